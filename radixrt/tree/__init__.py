"""The radix tree over token ids, in C++; no torch, no config, no clock.

`RadixTree` stores one int32 value per page of tokens (a worker's KV page numbers; none with `values=False`), has
leases, which pin paths, and evicts in LRU order. `OwnerTree` stores which owners have each path (the router's index of
what workers have cached).

Token ids and values are flat C-contiguous buffers of int32 (`array('i')`, numpy, memoryview), or `bytes` of
little-endian int32. A namespace is any string; paths of different namespaces share nothing.

Errors: ValueError for arguments out of range, TypeError for wrong types, AssertionError from `check()`.
"""

from radixrt.tree._radix import Lease, Match, OwnerTree, RadixTree, common_length, realigned, resembling

__all__ = ["Lease", "Match", "OwnerTree", "RadixTree", "common_length", "realigned", "resembling"]
