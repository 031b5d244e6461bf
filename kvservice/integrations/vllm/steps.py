"""The messages between the scheduler's side and the workers' sides of the connector in each step of vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvservice.errors import InternalError

Rank = tuple[int, int]
"""The pipeline-parallel rank of a worker, and the tensor-parallel one."""
MemoryId = tuple[int, int]
"""Names a memory of a store: see `MappedStore.identity`."""
BlockIds = npt.NDArray[np.int64]
"""The numbers of blocks in vLLM's pool, `[num_blocks]`."""


@dataclass(slots=True)
class LeasedBlocks:
    """Blocks that the scheduler's side has leased in a rank's store: where they lie in the memory of the store, and
    their versions, as `MappedStore.read` takes them."""

    memory: MemoryId
    offsets: bytes
    versions: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.offsets) // 8

    @staticmethod
    def joined(parts: Sequence[LeasedBlocks]) -> LeasedBlocks:
        """Return the blocks of all parts, which are in the same memory."""
        offsets, versions = (b"".join([part.offsets for part in parts]), b"".join([part.versions for part in parts]))
        return LeasedBlocks(parts[0].memory, offsets, versions)

    def __getitem__(self, part: slice) -> LeasedBlocks:
        numbers = slice(8 * part.start, 8 * part.stop)
        return LeasedBlocks(self.memory, self.offsets[numbers], self.versions[numbers])


@dataclass(frozen=True, eq=False)
class BlockLoad:
    """The blocks of a request that are loaded before it continues. `keys` are those of `block_ids`, one after the
    other. `leased` has them for each rank, if they are in memory that all ranks map."""

    request_id: str
    keys: bytes
    block_ids: list[int]
    leased: Mapping[Rank, LeasedBlocks] | None = None


@dataclass(frozen=True, eq=False)
class StepLoad:
    """Blocks of all requests that a step loads before it computes with them. `leased` has them for each rank, in the
    order of `block_ids`. The scheduler's side gets the `number` back when the load has ended."""

    number: int
    block_ids: BlockIds
    leased: Mapping[Rank, LeasedBlocks]


@dataclass(frozen=True, eq=False)
class BlockSave:
    """Blocks that are full after a step. `keys` are those of `block_ids`, one after the other. The scheduler's side
    gets the `number` back when nothing reads the blocks any more."""

    number: int
    keys: bytes
    block_ids: list[int]


@dataclass(frozen=True)
class ConnectorStep:
    """`loads` are asynchronous: their requests are not part of a step before they have ended. `abandoned` are the
    numbers of saves whose blocks may be overwritten from this step on. `num_skipped` blocks will not be
    saved. `computes`: whether this step or one that has not ended computes anything."""

    loads: tuple[BlockLoad, ...] = ()
    step_load: StepLoad | None = None
    saves: tuple[BlockSave, ...] = ()
    abandoned: frozenset[int] = frozenset()
    num_skipped: int = 0
    computes: bool = True


@dataclass
class WorkerReport:
    """The report of workers to the scheduler's side after a step: how many of them have ended each save and each load
    of the step, and which memory of its store a rank maps now."""

    saves: Counter[int] = field(default_factory=Counter)
    loads: Counter[int] = field(default_factory=Counter)
    memories: dict[Rank, MemoryId | None] = field(default_factory=dict)

    def add(self, other: WorkerReport) -> None:
        self.saves.update(other.saves)
        self.loads.update(other.loads)
        self.memories.update(other.memories)

    @property
    def empty(self) -> bool:
        return not (self.saves or self.loads or self.memories)


@dataclass
class TransferCounters:
    """Counters over an interval. Each name is also that of a metric, `vllm:kvservice_<name>`."""

    blocks_loaded: int = 0
    """Blocks loaded from the store."""
    blocks_loaded_in_step: int = 0
    """Blocks of these that were loaded by the step that computed with them."""
    blocks_not_loaded: int = 0
    """Blocks that could not be loaded and were computed again."""
    bytes_loaded: int = 0
    """Bytes loaded from the store."""
    load_seconds: float = 0.0
    """Seconds spent loading."""
    blocks_saved: int = 0
    """Blocks saved to the store."""
    blocks_not_saved: int = 0
    """Blocks that were not saved: no room, daemon away, or given up."""
    blocks_skipped: int = 0
    """Blocks that were not saved, because vLLM took them for others before there was room to hold them."""
    bytes_saved: int = 0
    """Bytes saved to the store."""
    save_seconds: float = 0.0
    """Seconds spent saving."""

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))

    @property
    def empty(self) -> bool:
        return not any(vars(self).values())


def wrong_load() -> InternalError:
    """Return the error of a step that has computed with blocks which were not right."""
    return InternalError(
        "blocks that a step has computed with were not right: a lease ended too early. vLLM cannot compute them again "
        'if it schedules asynchronously, unless "max_step_load_mib" is 0'
    )
