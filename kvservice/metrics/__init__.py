"""Prometheus metrics, computed from each reading of the daemon's shared memory.

pool        blocks, tokens, swap, prefix cache      calls     latency of RPCs and of lanes, the event loop
holders     sessions, tenants, regions, lanes       about     build, configuration, events
access      connections over TCP, refused callers   store     the block store
scheduling  queues, preemptions and tokens of schedulers
tiers       the tiers below the block store              spill     blocks of the pool below it, saved sessions
transfers   transfers between hosts
"""
