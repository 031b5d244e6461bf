"""The CUDA extension. Pointers are integers, streams are handles, dtypes are the numbers of `DType` in csrc/pool.h
(0 float32, 1 float16, 2 bfloat16, 3 float8_e4m3fn, 4 float8_e5m2). It imports without a driver."""

class CudaError(RuntimeError):
    """A CUDA call failed; `code` is its cudaError_t."""

    code: int

def device_count() -> int:
    """0 where there is no driver."""

def device_facts(device: int) -> dict[str, int | str]:
    """name, major, minor, num_multiprocessors, l2_bytes, total_bytes."""

def memory_info(device: int) -> tuple[int, int]:
    """(free, total) bytes."""

def set_device(device: int) -> None:
    """Of the calling thread."""

class DeviceMemory:
    """Made with the virtual-memory API, mapped for as long as it lives."""

    def __init__(self, device: int, num_bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def export_fd(self) -> int: ...
    def close(self) -> None: ...

class HostRegistration:
    """Page-locks host memory that somebody else owns."""

    def __init__(self, address: int, num_bytes: int) -> None: ...
    def close(self) -> None: ...

class Stream:
    def __init__(self, device: int, high_priority: bool = False) -> None: ...
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None: ...
    def wait(self, event: Event) -> None: ...

class Event:
    """Without timing unless asked for. `synchronize` lets go of the interpreter lock."""

    def __init__(self, device: int, timing: bool = False) -> None: ...
    def record(self, stream: int) -> None: ...
    def synchronize(self) -> None: ...
    def done(self) -> bool: ...
    def elapsed_ms(self, start: Event) -> float: ...

def allocate_async(num_bytes: int, stream: int) -> int: ...
def free_async(pointer: int, stream: int) -> None: ...
def copy_async(dst: int, src: int, num_bytes: int, stream: int) -> None:
    """Either way; the direction follows from the pointers."""

def fill_async(dst: int, byte: int, num_bytes: int, stream: int) -> None: ...
def write_kv(
    pool: int,
    pool_dtype: int,
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    layer: int,
    num_tokens: int,
    slot_mapping: int,
    key: int,
    value: int,
    dtype: int,
    k_scale: int,
    v_scale: int,
    stream: int,
) -> None: ...
def read_kv(
    pool: int,
    pool_dtype: int,
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    layer: int,
    num_tokens: int,
    slots: int,
    key: int,
    value: int,
    dtype: int,
    k_scale: int,
    v_scale: int,
    stream: int,
) -> None: ...

class Attention:
    """One call's arguments; attributes not set are off. `kernel`: auto, reference, decode, extend or cascade."""

    pool: int
    pool_dtype: int
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    layer: int
    dtype: int
    num_tokens: int
    num_seqs: int
    num_heads: int
    max_blocks: int
    max_query_len: int
    num_common_blocks: int
    query: int
    query_lens: int
    block_tables: int
    context_lens: int
    alibi_slopes: int
    k_scale: int
    v_scale: int
    scale: float
    soft_cap: float
    sliding_window: int
    sparse: tuple[int, int, int, int, int]  # vert_stride, local_blocks, block_size, head_sliding_step, tp_rank
    out: int
    lse: int
    workspace: int
    workspace_bytes: int
    batch_invariant: bool
    kernel: str
    stream: int

    def __init__(self) -> None: ...
    def wanted_workspace_bytes(self) -> int: ...
    def launch(self) -> None: ...

def copy_blocks(
    src: int,
    dst: int,
    num_src_blocks: int,
    num_dst_blocks: int,
    block_bytes: int,
    src_ids: object,
    dst_ids: object,
    stream: int,
) -> None:
    """`src_ids`, `dst_ids`: NumPy int32 arrays, in host memory."""
