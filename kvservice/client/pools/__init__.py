"""The pool in the client's own process: its mapping, the tables of the session's steps, and the kernels on it."""
