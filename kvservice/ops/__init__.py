"""Operations on the pool: write keys and values, read them back, attend, copy blocks. Arrays are NumPy arrays.

The compiled extension does the work on its own threads, without the interpreter lock. Every argument is checked before
any memory is accessed; an invalid one raises `InvalidArgumentError` whose `field` is the argument's name. Inputs may be
strided (they are then copied); pools and `out` must be contiguous. `kvservice.ops.cuda` has the same operations for
CUDA device memory, and `kvservice.ops.torch_ops` offers both as torch custom ops.
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
