"""Data shared by daemon and observer: memory that the daemon writes and the observer reads, and a pair of sockets.

arrays      named arrays in one memory file     calls       latency of calls by method, status and transport
sessions    one row per session                 vitals      gauges and counters of the daemon, written on request
link        requests and replies over a socket
"""
