"""A connector of vLLM's scheduler and the connectors of its workers, over stores in this process."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_store import FakeStore
from vllm_requests import BLOCK_SIZE, FakeOutput, FakeRequest
from vllm_stub import Role, name_of_block

from kvservice.client import KVClient
from kvservice.client.store.values import split_keys
from kvservice.integrations.vllm.steps import BlockLoad, ConnectorStep

NUM_BLOCKS = 8


class FullAttentionSpec: ...


@dataclass
class FakeTransferConfig:
    kv_connector_extra_config: dict[str, Any]
    kv_role: str
    kv_load_failure_policy: str = "recompute"

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role in ("kv_both", "kv_consumer")

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in ("kv_both", "kv_producer")


def connector_config(address: str = "unix:///none", **changes: Any) -> Any:
    """Return a VllmConfig. Changes are options of the connector under `extra`, and the values below."""
    values: dict[str, Any] = {
        "extra": {},
        "algorithm": "sha256_cbor",
        "block_size": BLOCK_SIZE,
        "cache_dtype": "auto",
        "caching": True,
        "ahead": False,
        "consumer": True,
        "dcp": 1,
        "dtype": "torch.float32",
        "producer": True,
        "scales": False,
        "speculative": None,
        "match_unit": None,
        "model": "org/name",
        "text": "{}",
        "commit": None,
        "revision": "main",
        "quantization": None,
        "seed": 0,
        "length": 8,
        "multimodal": None,
        "load_format": "auto",
    } | changes
    return SimpleNamespace(
        kv_transfer_config=FakeTransferConfig(
            # Tests must not depend on the speed of the machine.
            kv_connector_extra_config={"address": address, "lookup_timeout_s": 60} | values["extra"],
            kv_role={(True, True): "kv_both", (True, False): "kv_consumer", (False, True): "kv_producer"}[
                values["consumer"], values["producer"]
            ],
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=values["algorithm"],
            calculate_kv_scales=values["scales"],
            enable_prefix_caching=values["caching"],
            block_size=values["block_size"],
            cache_dtype=values["cache_dtype"],
            prefix_match_unit=values["match_unit"],
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=values["dcp"], prefill_context_parallel_size=1, pipeline_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(async_scheduling=values["ahead"]),
        speculative_config=values["speculative"],
        model_config=SimpleNamespace(
            model=str(values["model"]),
            dtype=values["dtype"],
            hf_config=SimpleNamespace(to_json_string=lambda use_diff: values["text"], _commit_hash=values["commit"]),
            revision=values["revision"],
            quantization=values["quantization"],
            seed=values["seed"],
            max_model_len=values["length"],
            multimodal_config=values["multimodal"],
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
    )


def cache_config(*specs: object, num_blocks: int = NUM_BLOCKS, replicas: int = 1) -> Any:
    """Return a KVCacheConfig with a group for each spec. So many ranks have the same blocks."""
    specs = specs or (FullAttentionSpec(),)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{n}"]) for n, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=num_blocks, kv_tp_replicas=replicas)


@contextlib.contextmanager
def stores_of(open_store: Callable[[str], Any]) -> Iterator[None]:
    """Let clients open other stores, by the name of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVClient, "store", lambda _client, _namespace, **options: open_store(options["name"]))
        yield


class SlidingWindowSpec:
    def __init__(self, sliding_window: int, block_size: int = BLOCK_SIZE) -> None:
        self.sliding_window, self.block_size = sliding_window, block_size


class MambaSpec:
    def __init__(self, mamba_cache_mode: str = "align", num_speculative_blocks: int = 0) -> None:
        self.block_size, self.mamba_cache_mode = BLOCK_SIZE, mamba_cache_mode
        self.num_speculative_blocks = num_speculative_blocks


class FakeBlock:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0
        self.block_hash: bytes | None = None


class FakePool:
    """vLLM's BlockPool."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [FakeBlock(block_id) for block_id in range(num_blocks)]

    @property
    def used(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_cnt}

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - len(self.used)

    def cache(self, request: FakeRequest, block_ids: Sequence[int], group: int = 0) -> None:
        """Have a request's full blocks in the prefix cache."""
        for block_id, block_hash in zip(block_ids, request.block_hashes, strict=False):
            self.blocks[block_id].block_hash = name_of_block(block_hash, group)

    def reset_prefix_cache(self) -> bool:
        return not self.used


class Engine:
    """An engine of vLLM with a worker for each store; None: one of the daemon. Block b of a layer is full of b + 1.

    The scheduler has views of its own of the stores' values, `asked`, so that `calls` of both are apart.
    """

    def __init__(
        self,
        connector: Any,
        *stores: FakeStore | None,
        values: int = 16,
        config: Any = None,
        layers: dict[str, torch.Tensor] | None = None,
        num_blocks: int = NUM_BLOCKS,
        pool_blocks: int = 100 * NUM_BLOCKS,
        specs: Sequence[object] = (),
        replicas: int = 1,
    ) -> None:
        self.stores = [store for store in stores if store is not None]
        self.asked = [FakeStore(store.values) for store in self.stores[::replicas]]
        config = connector_config() if config is None else config
        groups = connector.groups.tensor
        self.layers = {"layer": blocks_of(values, num_blocks)} if layers is None else layers
        self.counted: Counter[str] = Counter()
        self.workers = []
        for rank, store in enumerate(stores):
            groups.rank_in_group, groups.world_size = rank, len(stores)
            worker = connector(config, Role.WORKER, cache_config(*specs, num_blocks=num_blocks, replicas=replicas))
            with contextlib.nullcontext() if store is None else stores_of(lambda _, store=store: store):  # type: ignore[misc]
                worker.register_kv_caches(self.layers)
            self.workers.append(worker)
        groups.rank_in_group, groups.world_size = 0, 1
        self.scheduler = connector(config, Role.SCHEDULER, cache_config(*specs, num_blocks=num_blocks))
        handshakes = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.pool = FakePool(pool_blocks)
        self.scheduler.bind_gpu_block_pool(self.pool)
        opened = iter([store for store in self.asked for _ in range(2)])
        with stores_of(lambda _: next(opened)) if self.stores else contextlib.nullcontext():
            if handshakes:
                self.scheduler.set_xfer_handshake_metadata_pp_aware(handshakes)

    @property
    def blocks(self) -> torch.Tensor:
        return self.layers["layer"]

    @property
    def store(self) -> FakeStore:
        return self.stores[0]

    @property
    def worker(self) -> Any:
        return self.workers[0]

    def asked_for(self, request: FakeRequest, num_computed: int = 0) -> tuple[int, bool]:
        """Ask for a request as vLLM does, once in each step, until the answer is there: how many tokens, and whether
        they are loaded asynchronously."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed)
            if found is not None:
                assert found or not is_async
                return int(found), is_async
            assert not is_async
            self.scheduler.build_connector_meta(FakeOutput({}))
            time.sleep(0.001)
        raise AssertionError("there is no answer")

    def matched(self, request: FakeRequest, num_computed: int = 0) -> int:
        return self.asked_for(request, num_computed)[0]

    def allocated(
        self, request: FakeRequest, block_ids: Sequence[int], num_external: int = 0, *others: Sequence[int]
    ) -> None:
        """`others` are the blocks of other groups."""
        blocks = SimpleNamespace(get_block_ids=lambda: (list(block_ids), *map(list, others)))
        self.scheduler.update_state_after_alloc(request, blocks, num_external)

    @staticmethod
    def request(request_id: str, keys: Sequence[bytes]) -> FakeRequest:
        """Return a request whose blocks have these keys."""
        return KeyedRequest(request_id, keys)

    def step(self, output: FakeOutput | None = None) -> Any:
        """Return the scheduler's message to the workers, which has its step."""
        return self.scheduler.build_connector_meta(output or FakeOutput({}))

    def compute(self, message: Any, ranks: Sequence[int] | None = None) -> Any:
        """Let workers do a step, and the scheduler take its output. Returns the output."""
        outputs = []
        for rank in range(len(self.workers)) if ranks is None else ranks:
            worker = self.workers[rank]
            worker.handle_preemptions(message)
            worker.bind_connector_metadata(message)
            worker.start_load_kv(None)
            worker.wait_for_save()
            outputs.append(output_of(worker))
        output = added(outputs)
        self.counted.update({} if output.kv_connector_stats is None else output.kv_connector_stats.data)
        self.scheduler.update_connector_output(output)
        return output

    def save(self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> Any:
        """Run a request that has just computed these blocks. Returns the message of the step."""
        request = KeyedRequest(request_id, keys)
        self.allocated(request, block_ids)
        computed = len(keys) * BLOCK_SIZE
        message = self.step(FakeOutput({request_id: 0}, new=[(request, block_ids, computed)]))
        self.compute(message)
        return message

    def settle(self) -> None:
        """Run empty steps until nothing is held."""
        deadline = time.monotonic() + 60
        while self.scheduler.has_pending_push_work():
            assert time.monotonic() < deadline, "blocks are held for ever"
            self.compute(self.step())

    def load(self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begin to load the blocks of a request asynchronously."""
        step = ConnectorStep(loads=(BlockLoad(request_id, b"".join(keys), list(block_ids)),), computes=False)
        for worker in self.workers:
            message = SimpleNamespace(step=step)
            worker.handle_preemptions(message)
            worker.bind_connector_metadata(self.message_of(step))
            worker.start_load_kv(None)

    def message_of(self, step: ConnectorStep) -> Any:
        """Return the scheduler's message with another step."""
        message = self.step()
        message.step = step
        return message

    def loaded(self, rank: int = 0) -> tuple[set[str], set[int]]:
        """Wait until an asynchronous load has ended. Returns the requests, and the blocks that are not right."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            _, finished = self.workers[rank].get_finished(set())
            if finished:
                return finished, self.workers[rank].get_block_ids_with_load_errors()
            time.sleep(0.001)
        raise AssertionError("no load has ended")

    def close(self) -> None:
        """End both sides. Everything that is pending is done first."""
        for side in (*self.workers, self.scheduler):
            side.shutdown()
        assert all(store.closed for store in (*self.stores, *self.asked))


def output_of(worker: Any) -> Any:
    """Return the KVConnectorOutput of a worker after a step."""
    _, finished = worker.get_finished(set())
    return SimpleNamespace(
        finished_recving=set(finished),
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
        kv_connector_stats=worker.get_kv_connector_stats(),
    )


def added(outputs: Sequence[Any]) -> Any:
    """Add up the outputs of all workers, as vLLM does it if they end loads in the same step."""
    metadata = [output.kv_connector_worker_meta for output in outputs if output.kv_connector_worker_meta is not None]
    stats = [output.kv_connector_stats for output in outputs if output.kv_connector_stats is not None]
    return SimpleNamespace(
        finished_recving=set.intersection(*(output.finished_recving for output in outputs)),
        invalid_block_ids=set.union(*(output.invalid_block_ids for output in outputs)),
        kv_connector_worker_meta=functools.reduce(lambda some, other: some.aggregate(other), metadata)
        if metadata
        else None,
        kv_connector_stats=functools.reduce(lambda some, other: some.aggregate(other), stats) if stats else None,
    )


class KeyedRequest(FakeRequest):
    """A request whose blocks have these keys."""

    def __init__(self, request_id: str, keys: Sequence[bytes]) -> None:
        super().__init__(request_id, list(range(len(keys) * BLOCK_SIZE)))
        self.keys = list(keys)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.keys


def blocks_of(values: int, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """Return int32 `[num_blocks, values]` whose block b is full of b + 1."""
    return (torch.arange(num_blocks, dtype=torch.int32)[:, None] + 1).repeat(1, values)


OpenEngine = Callable[..., Engine]


def run(made: Engine, request: FakeRequest, blocks: list[int], external: int = 0) -> None:
    made.matched(request)
    made.allocated(request, blocks, external)


def saves(message: Any) -> list[tuple[list[bytes], list[int]]]:
    """Return the keys and blocks that the workers are told to save."""
    return [(split_keys(save.keys), save.block_ids) for save in message.step.saves]
