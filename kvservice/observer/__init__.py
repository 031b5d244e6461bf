"""The observer process: it reads the daemon's shared memory and serves the live page, metrics and snapshots.

process      startup, one reading per second, replies to the daemon
views        data of the page, and the state as rows and rates
blocks       states of blocks, and the pool map
history      recent readings, with rates and quantiles over them
http_server  HTTP: the page, its stream, metrics
"""
