"""The kept memory of a block manager, copied at every line of an operation, as if its process ended there."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

import kvservice.blocks
from kvservice.blocks import SCHEDULED, BlockManager, BlocksConfig, EventJournal, KeptMaps

BLOCKS_FOLDER = str(Path(kvservice.blocks.__file__).parent)
Array = npt.NDArray[Any]
Key = tuple[int, int]
MAPS = ("extra_keys", "pins", "lost", "steps", "writers", "quarantine")


class Memory:
    """Kept arrays in one buffer, so that all of them are copied at once."""

    NUM_BYTES = 1 << 16

    def __init__(self, content: bytes = b"") -> None:
        self.buffer = np.zeros(self.NUM_BYTES, np.uint8)
        self.buffer[: len(content)] = np.frombuffer(content, np.uint8)
        self.used = 0
        self.item_bytes: list[tuple[int, int]] = []

    def zeros(self, _: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return np.zeros(shape, dtype)

    def kept(self, _: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, private: bool = False) -> Array:
        del private
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape)) * kind.itemsize
        first, self.used = self.used, self.used + -(-num_bytes // 64) * 64
        assert self.used <= self.NUM_BYTES
        self.item_bytes.append((self.used, kind.itemsize))
        return self.buffer[first : first + num_bytes].view(kind).reshape(shape)

    def items(self) -> npt.NDArray[np.int64]:
        """Return the number of the array element at each byte in use. An element is stored in one piece."""
        numbers, begin = np.zeros(self.used, np.int64), 0
        for end, size in self.item_bytes:
            numbers[begin:end] = np.arange(begin, end) // size * size
            begin = end
        return numbers


@dataclasses.dataclass(frozen=True)
class State:
    """A copy of all kept memory."""

    content: bytes
    maps: tuple[dict[int, bytes], ...]


class KeptManager(BlockManager):
    """A manager over its own kept memory, which begins as a copy of `state`."""

    def __init__(self, config: BlocksConfig, clock: Callable[[], float], state: State | None = None) -> None:
        self.memory = Memory(b"" if state is None else state.content)
        maps = KeptMaps()
        for name, values in zip(MAPS, () if state is None else state.maps, strict=state is not None):
            getattr(maps, name).update(values)
        journal = EventJournal(window=1 << 20, with_tokens=True)
        super().__init__(config, clock=clock, journal=journal, memory=self.memory, kept=maps)

    def kept_state(self) -> State:
        maps = tuple(dict(getattr(self.kept, name)) for name in MAPS)
        return State(self.memory.buffer[: self.memory.used].tobytes(), maps)


@dataclasses.dataclass
class Seen:
    """The lines of kvservice/blocks that ran, and its functions during which kept memory changed."""

    lines: set[tuple[CodeType, int]] = dataclasses.field(default_factory=set)
    storing: set[CodeType] = dataclasses.field(default_factory=set)


def traced(manager: KeptManager, call: Callable[[], Any], seen: Seen) -> tuple[Any, list[State]]:
    """Run a call. Returns its result, and the kept memory before, at each line of kvservice/blocks, and after, without
    repetitions. What ran is added to `seen`."""
    states = [manager.kept_state()]

    def compare(frame: FrameType | None) -> None:
        """Keep the state if it has changed. Functions from this frame up have done that."""
        if (now := manager.kept_state()) == states[-1]:
            return
        states.append(now)
        while frame is not None:
            if is_ours(frame):
                seen.storing.add(frame.f_code)
            frame = frame.f_back

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen.lines.add((frame.f_code, frame.f_lineno))
        compare(frame)
        return at_line

    def at_call(frame: FrameType, _event: str, _: Any) -> Any:
        if not is_ours(frame):
            return None
        compare(frame.f_back)
        return at_line

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        result = call()
    finally:
        sys.settrace(before)
    compare(None)
    return result, states


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(BLOCKS_FOLDER)


def torn(states: list[State], items: npt.NDArray[np.int64], rng: np.random.Generator) -> list[State]:
    """Return states between two lines: some of the elements that a line stores have their new values."""
    mixed = []
    for one, two in itertools.pairwise(states):
        old, new = (np.frombuffer(state.content, np.uint8) for state in (one, two))
        changed = np.unique(items[old != new])
        if len(changed) < 2:
            continue
        for chosen in (
            changed[: len(changed) // 2],
            changed[len(changed) // 2 :],
            changed[rng.random(len(changed)) < 0.5],
        ):
            content = np.where(np.isin(items, chosen), new, old).astype(np.uint8).tobytes()
            mixed.append(State(content, (one, two)[rng.integers(2)].maps))
    return mixed


@dataclasses.dataclass(frozen=True)
class View:
    """A sequence, bit by bit."""

    tokens: tuple[int, ...]
    num_computed: int
    blocks: tuple[int, ...]
    hashes: tuple[bytes | None, ...]
    extra: tuple[tuple[int, bytes], ...]
    swapped: bool
    scheduled: bool


def views(manager: BlockManager) -> dict[Key, View]:
    """Return all sequences by number of the namespace and id."""
    return {
        (space.number, name): view(manager, row) for space in manager.namespaces for name, row in space.rows.items()
    }


def view(manager: BlockManager, row: int) -> View:
    state = manager
    length, computed, num_blocks, _, swapped, _, _, flags = state.sequences.states[row].tolist()
    blocks = state.sequences.block_tables[row, :num_blocks]
    pool = state.swap if swapped else state.device
    num_full = computed // state.config.block_size if state.config.enable_prefix_caching else 0
    extra = state.sequences.extra_keys.by_row.get(row, {})
    return View(
        tokens=tuple(pool.token_ids[blocks].reshape(-1)[:length].tolist()),
        num_computed=computed,
        blocks=tuple(blocks.tolist()),
        hashes=tuple(pool.hashes[block] for block in blocks[:num_full].tolist()),
        extra=tuple(sorted(extra.items())),
        swapped=bool(swapped),
        scheduled=bool(flags & SCHEDULED),
    )


def pins(manager: BlockManager) -> dict[Key, list[int]]:
    return {
        (space.number, pin_id): blocks.tolist() for space in manager.namespaces for pin_id, blocks in space.pins.items()
    }
