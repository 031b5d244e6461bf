"""The transports: how the tensors of a step's calls get to the daemon, or the kernels to them."""
