"""The radix tree: which token paths are held, and by what or whom. A C++ core; no torch, no config, no clock.

`RadixTree` holds one int32 value for each page of tokens (a worker's KV page numbers; with `values=False` none), leases
that pin paths, and evicts in LRU order. `OwnerTree` holds for each path who has it (a router's index of workers).

Token ids and values are flat C-contiguous buffers of int32 (`array('i')`, numpy, memoryview) or `bytes` of
little-endian int32. A namespace is any string; paths of two namespaces never share.

Errors: ValueError for arguments out of range, TypeError for wrong types, AssertionError from `check()`.
"""

from radixrt.tree._radix import Lease, Match, OwnerTree, RadixTree, common_length, realigned, resembling

__all__ = ["Lease", "Match", "OwnerTree", "RadixTree", "common_length", "realigned", "resembling"]
