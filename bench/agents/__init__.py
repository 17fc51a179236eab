"""Recorded agents against any server: see `bench.agents.__main__`."""
