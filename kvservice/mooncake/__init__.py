"""A client of a Mooncake Store in a process of its own, and a node that gives memory to such a store.

The library is imported in these processes only: whatever it does, the daemon goes on. kvservice.tiers.mooncake is the
daemon's side.
"""
