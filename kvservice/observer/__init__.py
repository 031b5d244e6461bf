"""The observer process: it reads the daemon's shared memory and serves the live page, metrics and snapshots.

process      startup, one reading per second, replies to the daemon
views        data of the page: the state as rows and rates, states of blocks, the pool map
history      recent readings, with rates and quantiles over them
http_server  HTTP: connections and their limits
web_api      access, the page, its stream, its data, metrics
"""
