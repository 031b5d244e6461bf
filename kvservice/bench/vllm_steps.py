"""Measures the time that the connector takes of vLLM's scheduling thread, without vLLM: `bench vllm --no-engine`.

A stand-in for vLLM's scheduler makes the calls that vLLM makes, in their order, to both sides of the connector, with a
real daemon. Every few steps 16 prompts come at once; between them requests decode. While a device would compute, the
thread waits, and the threads of the connector go on. The blocks are small, and a load copies nothing: on a GPU the
step only launches it.
"""

from __future__ import annotations

import gc
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from kvservice.bench import table
from kvservice.client import KVClient, StoreNamespace
from kvservice.integrations.common import ComputeTime
from kvservice.integrations.vllm.copies import HostCopier, StepRead, block_layout
from kvservice.integrations.vllm.finder import StoreFinder
from kvservice.integrations.vllm.groups import CacheGroups, Group
from kvservice.integrations.vllm.lookup import StoreLookup
from kvservice.integrations.vllm.scheduling import ConnectorScheduler, SchedulingOptions
from kvservice.integrations.vllm.steps import LeasedBlocks, WorkerReport
from kvservice.integrations.vllm.working import ConnectorWorker
from kvservice.launch import Daemon

BLOCK_SIZE, BLOCK_BYTES = 16, 8192
# Requests that run at most.
RUNNING = 64
# Steps whose prompts are saved before they are found.
KNOWN = 4
# A step computes so long: with prompts, and without.
PROMPTS_S, DECODE_S = 0.02, 0.006
POOL = {"num_layers": 1, "num_kv_heads": 1, "head_size": 32, "num_blocks": 64}
STORE_GIB = 0.125
RANK = (0, 0)
# The calls of a step, as vLLM makes them.
PARTS = ("admission", "building the step", "worker", "output", "ended requests")
NO_SECONDS = bytes(2 * 8 * len(PARTS))
Seconds = npt.NDArray[np.float64]
"""The times `[steps, parts, 2]` that each part of each step takes, by the wall's clock and in CPU time. A part that a
step does not have takes 0."""


@dataclass(frozen=True)
class StepsWorkload:
    """A step admits `num` prompts of `length` tokens, of which each generates `output_tokens`. `found`: each has been
    saved before, and vLLM has forgotten it. A `tight` pool has blocks for 46,800 tokens, otherwise for all requests and
    a fourth more."""

    num: int
    length: int
    output_tokens: int = 24
    found: bool = False
    tight: bool = False

    @property
    def name(self) -> str:
        kind = f"{'found' if self.found else 'new'}{', tight pool' if self.tight else ''}"
        return f"{self.num} x {self.length:,} + {self.output_tokens}, {kind}"

    @property
    def blocks_each(self) -> int:
        return -(-(self.length + self.output_tokens) // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        return 46_800 // BLOCK_SIZE if self.tight else 5 * (RUNNING + self.num) * self.blocks_each // 4


WORKLOADS = (
    StepsWorkload(16, 512),
    StepsWorkload(16, 512, found=True),
    StepsWorkload(16, 2048),
    StepsWorkload(16, 2048, found=True),
    StepsWorkload(16, 512, output_tokens=2, tight=True),
    StepsWorkload(4, 2048, output_tokens=8, tight=True),
)


@dataclass(frozen=True)
class StepsOptions:
    """So many steps with prompts of each workload are timed, after a tenth of them."""

    rounds: int = 200
    workloads: tuple[StepsWorkload, ...] = WORKLOADS

    @staticmethod
    def quick() -> StepsOptions:
        return StepsOptions(10, WORKLOADS[:2])


class Block:
    __slots__ = ("block_hash", "block_id", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0
        self.block_hash: bytes | None = None


class StandInPool:
    """Stands in for vLLM's BlockPool, with the methods that the connector calls, at about their costs. Free blocks are
    in the order in which they are evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = OrderedDict((block.block_id, block) for block in self.blocks)

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, num: int) -> list[int]:
        taken = [self._free.popitem(last=False)[1] for _ in range(num)]
        for block in taken:
            block.block_hash, block.ref_cnt = None, 1
        return [block.block_id for block in taken]


@dataclass(eq=False)
class StandInRequest:
    request_id: str
    num_prompt_tokens: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    lora_request: None = None

    def list_blocks(self) -> tuple[list[int]]:
        return (list(self.block_ids),)


class PartTimes:
    """The seconds of the connector in each step and part, by the wall's clock and in CPU time of the thread, and the
    collections of the oldest generation of objects that began there. They are in arrays: many objects that stay would
    let the collector run more often."""

    def __init__(self) -> None:
        self.num_collections = 0
        self._is_ours = False
        gc.callbacks.append(self._collects)
        self.clear()

    def clear(self) -> None:
        self._steps, self._step = array("d"), array("d", NO_SECONDS)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        self.num_collections += self._is_ours and phase == "start" and info["generation"] == 2

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        place = 2 * PARTS.index(name)
        self._is_ours = True
        cpu, wall = time.thread_time(), time.perf_counter()
        yield
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self._is_ours = False
        self._step[place] += wall
        self._step[place + 1] += cpu

    def end_step(self) -> None:
        self._steps += self._step
        self._step = array("d", NO_SECONDS)

    def steps(self) -> Seconds:
        return np.array(self._steps).reshape(-1, len(PARTS), 2)

    def close(self) -> None:
        gc.callbacks.remove(self._collects)


class Copier(HostCopier):
    def read(self, memory: Any, leased: LeasedBlocks, block_ids: Any) -> StepRead:  # noqa: ARG002
        return StepRead.ended(memory.unchanged(leased.offsets, leased.versions))


class StandInEngine:
    """vLLM's scheduler and its only worker, which computes nothing."""

    def __init__(self, address: str, workload: StepsWorkload, times: PartTimes, stack: ExitStack) -> None:
        import torch

        client = stack.enter_context(KVClient(address))
        namespace = StoreNamespace(model="bench", block_bytes=BLOCK_BYTES)
        num_blocks = workload.num_blocks
        layout = block_layout({"layer": torch.zeros(num_blocks, BLOCK_BYTES, dtype=torch.uint8)}, num_blocks)
        self._worker = ConnectorWorker(client.store(namespace), Copier(layout, verify=False), BLOCK_BYTES)
        stack.callback(self._worker.close, 10.0)
        compute = ComputeTime.of(0.0, BLOCK_SIZE, BLOCK_BYTES)
        self._lookup = StoreLookup([StoreFinder(RANK, client.store(namespace), client.store(namespace), compute)], 1, 1)
        stack.callback(self._lookup.close, 10.0)
        everything = float(num_blocks * BLOCK_BYTES)
        options = SchedulingOptions(
            CacheGroups([Group()], BLOCK_SIZE),
            loads=True,
            saves=True,
            max_step_bytes=everything,
            max_beside_bytes=everything,
            max_held=0.1,
            save_decode=False,
        )
        self._workload, self._pool, self._times = workload, StandInPool(num_blocks), times
        self._scheduler = ConnectorScheduler(options)
        self._scheduler.bind(self._pool, lambda block_hash, _: block_hash)
        self._scheduler.use(self._lookup, {RANK: RANK}, BLOCK_BYTES)
        self._scheduler.received(WorkerReport(memories={RANK: self._worker.memory}), (), frozenset())
        self._running: list[StandInRequest] = []
        self.num_found = 0

    def has_room(self) -> bool:
        """Whether a step can admit prompts now."""
        workload = self._workload
        most = RUNNING - workload.num
        return (
            len(self._running) <= most and self._pool.get_num_free_blocks() >= (workload.num + 1) * workload.blocks_each
        )

    def step(self, admitted: Sequence[StandInRequest], compute_s: float) -> None:
        """Compute the prompts of `admitted`, and a token of each request that runs."""
        part, scheduler, worker = self._times.part, self._scheduler, self._worker
        new: list[Any] = []
        scheduled: dict[str, int] = {}
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        for request in self._running:
            scheduled[request.request_id] = 1
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
        for request in admitted:
            request.block_ids = self._pool.allocate(self._workload.blocks_each)
        num_found: list[int] = []
        if admitted:
            with part("admission"):
                for request in admitted:
                    found, is_async = scheduler.num_matched_tokens(request, 0)
                    assert found is not None
                    assert not is_async, "loads are part of the step"
                    scheduler.allocated(request, request.list_blocks, found)
                    num_found.append(found)
        for request, found in zip(admitted, num_found, strict=True):
            self.num_found += found
            for block_id, block_hash in zip(request.block_ids, request.block_hashes, strict=False):
                self._pool.blocks[block_id].block_hash = block_hash
            request.num_computed_tokens = found
            scheduled[request.request_id] = request.num_tokens - found
            ids = (request.block_ids,)
            new.append(SimpleNamespace(req_id=request.request_id, block_ids=ids, num_computed_tokens=found))
        output = SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        with part("building the step"):
            step = scheduler.step(output)
        with part("worker"):
            worker.before_step(step)
            worker.start_loads(step)
            worker.start_saves(step)
        time.sleep(compute_s)
        with part("worker"):
            ended = worker.end_step(computes=step.computes)
            report, counters = worker.take_report(), worker.take_counters()
        with part("output"):
            scheduler.count(counters.as_dict())
            scheduler.received(report or WorkerReport(), ended.loaded, ended.wrong)
        self._running += admitted
        for request in self._running:
            request.num_computed_tokens = request.num_tokens
            request.num_tokens += 1
        length = self._workload.output_tokens
        ended_requests = [one for one in self._running if one.num_tokens - one.num_prompt_tokens >= length]
        if ended_requests:
            with part("ended requests"):
                for request in ended_requests:
                    scheduler.finished(request, (request.block_ids,))
        for request in ended_requests:
            self._running.remove(request)
            self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(request.block_ids)])
        self._times.end_step()

    def run_until_idle(self) -> None:
        """Run until nothing is saved or loaded."""
        while self._running or self._scheduler.holds:
            self.step((), DECODE_S)


def prompts_of(workload: StepsWorkload, number: int) -> list[StandInRequest]:
    """Return the prompts of a step."""
    made = []
    for each in range(workload.num):
        blocks = range(workload.length // BLOCK_SIZE)
        hashes = [hashlib.sha256(repr((number, each, block)).encode()).digest() for block in blocks]
        made.append(StandInRequest(f"{number}-{each}", workload.length, hashes, num_tokens=workload.length))
    return made


def measure(workload: StepsWorkload, rounds: int, address: str) -> dict[str, Any]:
    """Return the figures of one workload."""
    with ExitStack() as stack:
        times = PartTimes()
        stack.callback(times.close)
        engine = StandInEngine(address, workload, times, stack)
        numbers = count()
        if workload.found:
            for number in range(KNOWN):
                engine.step(prompts_of(workload, number), PROMPTS_S)
                engine.run_until_idle()
        batches = [prompts_of(workload, number % KNOWN if workload.found else number) for number in range(rounds)]
        for number, batch in enumerate(batches):
            for each in batch:
                each.request_id = str(next(numbers))
            if number == rounds // 10:  # the first ones warm up
                gc.collect()
                gc.freeze()  # as vLLM does
                stack.callback(gc.unfreeze)
                times.clear()
                times.num_collections = 0
            engine.step(batch, PROMPTS_S)
            while not engine.has_room():
                engine.step((), DECODE_S)
        engine.run_until_idle()
    seconds = times.steps()
    admits = seconds[:, PARTS.index("admission"), 0] > 0
    steps = {"prompts": seconds[admits], "decode": seconds[~admits]}
    return {
        "workload": workload.name,
        "collections": times.num_collections,
        "found": engine.num_found,
        "steps": {kind: of_steps(some) for kind, some in steps.items() if len(some) > 1},
    }


def of_steps(steps: Seconds) -> dict[str, dict[str, float]]:
    """Return p50 and p99 of each part of these steps, and of all parts together."""
    made = {}
    for part, seconds in [*zip(PARTS, steps.swapaxes(0, 1), strict=True), ("all", steps.sum(axis=1))]:
        made[part] = {"steps": float(len(seconds))}
        for kind, each in zip(("wall", "cpu"), seconds.T, strict=True):
            p50, p99 = np.percentile(each, (50, 99)).tolist()
            made[part] |= {f"{kind}_p50_s": p50, f"{kind}_p99_s": p99}
    return made


def run(options: StepsOptions) -> dict[str, Any]:
    """Return the figures of each workload."""
    results = []
    for workload in options.workloads:
        with Daemon(store_gib=STORE_GIB, **POOL) as daemon:
            results.append(measure(workload, options.rounds, daemon.address))
    return {"workloads": results}


def render(results: dict[str, Any], console: Console) -> None:
    shown = table("The connector's share of a step, in ms", ("prompts", "part"), ("p50", "p99", "p50, CPU", "p99, CPU"))
    for result in results["workloads"]:
        for kind, parts in result["steps"].items():
            for part, figures in parts.items():
                if kind == "prompts" or part == "all":
                    name = f"{result['workload']}: {kind}" if part == "all" else ""
                    values = (figures[f"{each}_s"] for each in ("wall_p50", "wall_p99", "cpu_p50", "cpu_p99"))
                    shown.add_row(name, part, *(f"{1e3 * value:.3f}" for value in values))
        if result["collections"]:
            console.print(f"{result['workload']}: {result['collections']} collections of the oldest objects")
    console.print(shown)
