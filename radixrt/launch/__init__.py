"""Starts the processes of `radixrt serve`, on this machine and on those of a Ray cluster."""
