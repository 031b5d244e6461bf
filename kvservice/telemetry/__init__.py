"""Data shared by daemon and observer: memory that the daemon writes and the observer reads, and a pair of sockets.

arrays          named arrays in one memory file
sessions        one row per session
calls           latency of calls by method, status and transport
daemon_stats    gauges and counters of the daemon, written on request
store           figures of the block store, written on request
tiers           figures of the tiers below it, written on request
transfers       figures of transfers between hosts, written on request
figures         figures of parts that a daemon may lack, written on request
scheduling      figures of the schedulers, written on request
reading         what the observer reads from the arrays
link            requests and replies over a socket
"""
