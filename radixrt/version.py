"""The version, for modules that are imported by `radixrt` itself."""

__version__ = "0.1.0"
