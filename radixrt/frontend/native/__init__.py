"""The native API over HTTP."""
