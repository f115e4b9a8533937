"""Layer 1: tries over token ids. Knows tokens only, never KV arrays; imports nothing of the package but its errors.

`RadixTrie` answers look-ups of exact prefixes token by token; `plan` says which whole blocks the sessions of one
archive share; `matching` finds repeats anywhere in their tokens, with the kernels in `rolling`. These submodules load
numba, so they are imported by name, not here.
"""
