"""The process that watches the daemon: it reads the daemon's memory, and answers all who look.

process    starts, reads once a second, answers the daemon        views      the pool for the page, piece by piece
snapshot   the state in rows and rates                             blocks     states of blocks, and the map of them
history    what was read before, and rates and quantiles from it   web        HTTP: the page, its stream, metrics
"""
