"""A connector of vLLM's scheduler and the connectors of its workers, over stores in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_store import FakeStore
from vllm_requests import BLOCK_SIZE, FakeOutput, FakeRequest
from vllm_stub import Role

from kvservice.client import KVClient

NUM_BLOCKS = 8


class FullAttentionSpec: ...


def connector_config(address: str = "unix:///none", **changes: Any) -> Any:
    """Return a VllmConfig. Changes are options of the connector under `extra`, and the values below."""
    values: dict[str, Any] = {
        "extra": {},
        "algorithm": "sha256_cbor",
        "block_size": BLOCK_SIZE,
        "cache_dtype": "auto",
        "caching": True,
        "consumer": True,
        "dcp": 1,
        "dtype": "torch.float32",
        "producer": True,
        "scales": False,
        "speculative": None,
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
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"address": address} | values["extra"],
            is_kv_consumer=values["consumer"],
            is_kv_producer=values["producer"],
            kv_load_failure_policy="recompute",
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=values["algorithm"],
            calculate_kv_scales=values["scales"],
            enable_prefix_caching=values["caching"],
            block_size=values["block_size"],
            cache_dtype=values["cache_dtype"],
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=values["dcp"], prefill_context_parallel_size=1),
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


def cache_config(*specs: object, num_blocks: int = NUM_BLOCKS) -> Any:
    """Return a KVCacheConfig with a group for each spec."""
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=num_blocks)


@contextlib.contextmanager
def stores_of(open_store: Callable[[str], Any]) -> Iterator[None]:
    """Let clients open other stores, by the name of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVClient, "store", lambda _client, _namespace, **options: open_store(options["name"]))
        yield


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
    ) -> None:
        self.stores = [store for store in stores if store is not None]
        self.asked = [FakeStore(store.values) for store in self.stores]
        config = connector_config() if config is None else config
        self.layers = {"layer": blocks_of(values)} if layers is None else layers
        self.workers = []
        for store in stores:
            worker = connector(config, Role.WORKER, cache_config(num_blocks=num_blocks))
            with contextlib.nullcontext() if store is None else stores_of(lambda _, store=store: store):  # type: ignore[misc]
                worker.register_kv_caches(self.layers)
            self.workers.append(worker)
        self.scheduler = connector(config, Role.SCHEDULER, cache_config(num_blocks=num_blocks))
        handshakes = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        opened = iter(self.asked)
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

    def matched(self, request: FakeRequest, num_computed: int = 0) -> int:
        """Ask for a request as vLLM does, once in each step, until the answer is there."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found, loads = self.scheduler.get_num_new_matched_tokens(request, num_computed)
            if found is not None:
                assert loads == bool(found)
                return int(found)
            assert not loads
            self.scheduler.build_connector_meta(FakeOutput({}))
            time.sleep(0.001)
        raise AssertionError("there is no answer")

    def allocated(self, request: FakeRequest, block_ids: Sequence[int], num_external: int = 0) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: (list(block_ids),))
        self.scheduler.update_state_after_alloc(request, blocks, num_external)

    @staticmethod
    def request(request_id: str, keys: Sequence[bytes]) -> FakeRequest:
        """Return a request whose blocks have these keys."""
        return KeyedRequest(request_id, keys)

    def step(self, output: FakeOutput | None = None) -> Any:
        """Return the scheduler's message to the workers, which has its step."""
        return self.scheduler.build_connector_meta(output or FakeOutput({}))

    def compute(self, message: Any) -> None:
        """Let the workers do a step."""
        for worker in self.workers:
            worker.handle_preemptions(message)
            worker.bind_connector_metadata(message)
            worker.start_load_kv(None)
            worker.wait_for_save()

    def save(self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Run a request that has just computed these blocks, in a step that overwrites nothing else."""
        request = KeyedRequest(request_id, keys)
        self.allocated(request, block_ids)
        computed = len(keys) * BLOCK_SIZE
        self.compute(self.step(FakeOutput({request_id: 0}, new=[(request, block_ids, computed)])))

    def load(self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begin to load the blocks of a request."""
        self.allocated(KeyedRequest(request_id, keys), block_ids, len(keys) * BLOCK_SIZE)
        message = self.step()
        for worker in self.workers:
            worker.bind_connector_metadata(message)
            worker.start_load_kv(None)

    def loaded(self, rank: int = 0) -> tuple[set[str], set[int]]:
        """Wait until a load has ended. Returns the requests, and the blocks that are not right."""
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


class KeyedRequest(FakeRequest):
    """A request whose blocks have these keys."""

    def __init__(self, request_id: str, keys: Sequence[bytes]) -> None:
        super().__init__(request_id, list(range(len(keys) * BLOCK_SIZE)))
        self.keys = list(keys)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.keys


def blocks_of(values: int) -> torch.Tensor:
    """Return int32 `[NUM_BLOCKS, values]` whose block b is full of b + 1."""
    return (torch.arange(NUM_BLOCKS, dtype=torch.int32)[:, None] + 1).repeat(1, values)
