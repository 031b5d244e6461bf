"""What the daemon and its observer share: memory that the one writes and the other reads, and a pair of sockets.

arrays      named arrays in one memory file     calls       latency of calls, by method, status, transport
sessions    a row for each session              vitals      figures of the whole daemon, written when they are asked for
link        questions and answers over a socket
"""
