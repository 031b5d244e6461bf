"""The operations on the pool: write keys and values, read them back, attend, copy blocks. NumPy in, NumPy out.

The compiled extension does the work, on its own threads and without the interpreter lock. Every argument is checked
before anything is touched; a wrong one raises `InvalidArgumentError` whose `field` is the argument's name. Inputs may
be strided (they are then copied); pools and `out` must be contiguous. `kvservice.ops.cuda` has the
same operations for memory of a CUDA device, `kvservice.ops.torch_ops` for tensors of either as torch custom ops.
"""

from kvservice.ops.cpu import (
    attention,
    copy_blocks,
    cpu_isa,
    num_threads,
    read_kv,
    set_num_threads,
    write_kv,
)

__all__ = ["attention", "copy_blocks", "cpu_isa", "num_threads", "read_kv", "set_num_threads", "write_kv"]
