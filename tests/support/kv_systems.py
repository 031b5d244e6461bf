"""One API for two systems under test: a daemon with its client, and the engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kv_model import Array, Keys

from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest
from kvservice.client import KVClient, Pin, Session
from kvservice.client import Sequence as ClientSequence
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.server.calls.admin import stats_response


@dataclass(frozen=True)
class Info:
    """A sequence as the system describes it."""

    sequence_id: int
    length: int
    computed: int
    swapped: bool
    tokens: tuple[int, ...]


class DaemonSystem:
    """Sessions of a real daemon."""

    def __init__(self, client: KVClient, num_sessions: int) -> None:
        self.client = client
        self.sessions: list[Session] = [client.session() for _ in range(num_sessions)]

    def allocate(self, s: int, ids: list[int], prompts: list[list[int]], keys: list[Keys]) -> list[int]:
        made = self.sessions[s].allocate_batch(prompts, sequence_ids=ids, extra_keys=keys)
        return [one.num_cached_tokens for one in made]

    def append(self, s: int, ids: list[int], tokens: list[int], counts: list[int], lengths: list[int]) -> Any:
        named = [ClientSequence(*pair) for pair in zip(ids, lengths, strict=True)]
        return self.sessions[s].append(named, tokens, num_tokens=counts)

    def open_step(self, s: int, ids: list[int], counts: list[int] | None) -> Any:
        return self.sessions[s].open_step(_named(ids), counts)

    def attend(self, _: int, step: Any, layer: int, query: Array, key: Array, value: Array) -> Array:
        output: Array = step.attend(layer, query, key, value)
        return output

    def write(self, _: int, step: Any, layer: int | None, key: Array, value: Array) -> None:
        step.write(key, value, layer)

    def read(self, s: int, sequence_id: int, start: int, stop: int) -> tuple[Array, Array]:
        return self.sessions[s].read(ClientSequence(sequence_id, 0), start, stop)

    def fork(self, s: int, parents: list[int], children: list[int]) -> None:
        self.sessions[s].fork_batch(_named(parents), children)

    def truncate(self, s: int, sequence_id: int, length: int) -> None:
        self.sessions[s].truncate(ClientSequence(sequence_id, 0), length)

    def swap_out(self, s: int, ids: list[int]) -> None:
        self.sessions[s].swap_out(_named(ids))

    def swap_in(self, s: int, ids: list[int]) -> None:
        self.sessions[s].swap_in(_named(ids))

    def free(self, s: int, ids: list[int]) -> None:
        self.sessions[s].free(_named(ids))

    def match_prefix(self, s: int, tokens: list[int], keys: Keys) -> int:
        return self.sessions[s].match_prefix(tokens, keys)

    def pin(self, s: int, tokens: list[int], keys: Keys) -> Pin:
        return self.sessions[s].pin(tokens, 600.0, keys)

    def unpin(self, s: int, pin: Pin) -> None:
        self.sessions[s].unpin(pin)

    def reset_prefix_cache(self, s: int) -> None:
        self.sessions[s].reset_prefix_cache()

    def describe(self, s: int) -> list[Info]:
        return [
            Info(one.sequence_id, one.length, one.num_computed_tokens, one.swapped, one.token_ids)
            for one in self.sessions[s].describe(token_ids=True)
        ]

    def stats(self) -> Any:
        return self.client.stats()

    def check(self) -> None:
        """Check internal invariants. A daemon's cannot be checked from here."""

    def end(self) -> None:
        for session in self.sessions:
            session.close()
        with self.client.session() as last:
            last.reset_prefix_cache()


def _named(ids: list[int]) -> list[ClientSequence]:
    return [ClientSequence(sequence_id, 0) for sequence_id in ids]


class EngineSystem:
    """The engine without a server."""

    def __init__(self, config: ServeConfig, num_sessions: int, *, check_integrity: bool = True) -> None:
        self.engine = CacheEngine(config, open_device(config))
        self.manager = self.engine.manager
        self.spaces = [self.manager.open_namespace() for _ in range(num_sessions)]
        self._check_integrity = check_integrity
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def allocate(self, s: int, ids: list[int], prompts: list[list[int]], keys: list[Keys]) -> list[int]:
        requests = [AllocationRequest(*one) for one in zip(ids, prompts, keys, strict=True)]
        return [one.num_cached_tokens for one in self.manager.allocate(self.spaces[s], requests)]

    def append(self, s: int, ids: list[int], tokens: list[int], counts: list[int], lengths: list[int]) -> Any:
        as_array = np.asarray
        step = self.manager.append(
            self.spaces[s], as_array(ids), as_array(tokens, np.int32), as_array(counts), as_array(lengths)
        )
        self.engine.copy_on_write(step)
        return step

    def open_step(self, s: int, ids: list[int], counts: list[int] | None) -> Any:
        step = self.manager.open_step(self.spaces[s], np.array(ids), None if counts is None else np.array(counts))
        self.engine.copy_on_write(step)
        return step

    def attend(self, s: int, step: Any, layer: int, query: Array, key: Array, value: Array) -> Array:
        work = self.engine.attend(self.spaces[s], step.step_id, layer, query, key, value, AttentionOptions(), False)
        output: Array = self.run(work)[0]
        return output

    def write(self, s: int, step: Any, layer: int | None, key: Array, value: Array) -> None:
        self.run(self.engine.write(self.spaces[s], step.step_id, layer, key, value))

    def read(self, s: int, sequence_id: int, start: int, stop: int) -> tuple[Array, Array]:
        both: tuple[Array, Array] = self.run(self.engine.read(self.spaces[s], [(sequence_id, start, stop)], None))
        return both

    def fork(self, s: int, parents: list[int], children: list[int]) -> None:
        self.manager.fork(self.spaces[s], np.array(parents), np.array(children))

    def truncate(self, s: int, sequence_id: int, length: int) -> None:
        self.manager.truncate(self.spaces[s], np.array([sequence_id]), np.array([length]))

    def swap_out(self, s: int, ids: list[int]) -> None:
        self.engine.swap_out(self.spaces[s], np.array(ids))

    def swap_in(self, s: int, ids: list[int]) -> None:
        self.engine.swap_in(self.spaces[s], np.array(ids))

    def free(self, s: int, ids: list[int]) -> None:
        self.manager.free(self.spaces[s], np.array(ids))

    def match_prefix(self, _: int, tokens: list[int], keys: Keys) -> int:
        return self.manager.match_prefix(np.array(tokens), keys)

    def pin(self, s: int, tokens: list[int], keys: Keys) -> Pin:
        pin = self.manager.pin(self.spaces[s], np.array(tokens), keys, ttl_s=600.0)
        return Pin(pin.pin_id, pin.num_tokens)

    def unpin(self, s: int, pin: Pin) -> None:
        self.manager.unpin(self.spaces[s], pin.pin_id)

    def reset_prefix_cache(self, _: int) -> None:
        self.manager.reset_prefix_cache()

    def describe(self, s: int) -> list[Info]:
        found: Sequence[Any] = self.manager.describe(self.spaces[s], include_tokens=True)
        return [
            Info(one.sequence_id, one.length, one.num_computed, one.swapped, tuple(one.token_ids.tolist()))
            for one in found
        ]

    def stats(self) -> Any:
        return stats_response(self.manager.stats(), len(self.spaces))

    def check(self) -> None:
        if self._check_integrity:
            self.manager.check_integrity()

    def end(self) -> None:
        try:  # a faulty engine may fail here, too
            for space in self.spaces:
                self.manager.close_namespace(space)
        finally:
            self.engine.device.close()
            self._loop.close()
