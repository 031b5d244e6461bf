"""Argument checks of the CUDA operations, with a fake extension. They need no device."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from each_row import each_row

import kvservice
from kvservice.attention_options import BlockSparse
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.ops import cuda
from kvservice.ops.cuda import HOST, DeviceArray

# A pool of 9 blocks of 16 tokens, 3 layers, 2 KV heads of 64; two sequences, three tokens, 4 query heads.
POOL = DeviceArray(1 << 20, (9, 3, 2, 2, 64 * 16), "bfloat16", 0)
FLOAT8_POOL = replace(POOL, dtype="float8_e4m3fn")
QUERY = DeviceArray(1 << 30, (3, 4, 64), "bfloat16", 0)
OUT = replace(QUERY, pointer=1 << 31)
SCALE = DeviceArray(4096, (2,), "float32", 0)


class Recorder(ModuleType):
    """A fake of `kvservice._cuda` that records its calls."""

    def __init__(self) -> None:
        super().__init__("kvservice._cuda")
        self.calls: list[tuple[Any, ...]] = []
        self.launched: list[dict[str, Any]] = []
        self.next_pointer = 1 << 40
        self.wanted_bytes = 1 << 16
        recorder = self

        class Attention:
            def wanted_workspace_bytes(self) -> int:
                return recorder.wanted_bytes

            def launch(self) -> None:
                recorder.launched.append(dict(vars(self)))

        self.Attention = Attention

    def device_count(self) -> int:
        return 1

    def allocate_async(self, num_bytes: int, stream: int) -> int:
        self.calls.append(("allocate_async", num_bytes, stream))
        self.next_pointer += 1 << 30
        return self.next_pointer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    stand_in = Recorder()
    monkeypatch.setitem(sys.modules, "kvservice._cuda", stand_in)
    monkeypatch.setattr(kvservice, "_cuda", stand_in, raising=False)
    return stand_in


def attend(**changed: Any) -> None:
    arguments: dict[str, Any] = {
        "pool": POOL,
        "layer": 1,
        "query": QUERY,
        "query_lens": DeviceArray(256, (2,), "int32", 0),
        "block_tables": DeviceArray(512, (2, 5), "int32", 0),
        "context_lens": DeviceArray(768, (2,), "int32", 0),
        "max_query_len": 2,
        "out": OUT,
        "workspace": cuda.Workspace(0, 7),
        "stream": 7,
        **changed,
    }
    cuda.attention(**arguments)


def test_attention_hands_everything_on(recorder: Recorder) -> None:
    attend(
        pool=FLOAT8_POOL,
        k_scale=SCALE,
        v_scale=replace(SCALE, pointer=8192),
        alibi_slopes=DeviceArray(12288, (4,), "float32", 0),
        lse=DeviceArray(16384, (3, 4), "float32", 0),
        block_sparse=BlockSparse(4, 2, 32, -1, 3),
        sliding_window=9,
        logits_soft_cap=2.5,
        batch_invariant=True,
        num_common_blocks=4,
        kernel="decode",
    )
    (launched,) = recorder.launched
    workspace = launched.pop("workspace")
    assert launched == {
        "pool": 1 << 20,
        "pool_dtype": 3,
        "num_blocks": 9,
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_size": 64,
        "block_size": 16,
        "layer": 1,
        "dtype": 2,
        "num_tokens": 3,
        "num_seqs": 2,
        "num_heads": 4,
        "max_blocks": 5,
        "max_query_len": 2,
        "num_common_blocks": 4,
        "query": 1 << 30,
        "query_lens": 256,
        "block_tables": 512,
        "context_lens": 768,
        "alibi_slopes": 12288,
        "k_scale": 4096,
        "v_scale": 8192,
        "scale": 0.125,
        "soft_cap": 2.5,
        "sliding_window": 9,
        "sparse": (4, 2, 32, -1, 3),
        "out": 1 << 31,
        "lse": 16384,
        "workspace_bytes": 1 << 16,
        "batch_invariant": True,
        "kernel": "decode",
        "stream": 7,
    }
    assert recorder.calls == [
        ("set_device", 0),
        ("set_device", 0),
        ("allocate_async", 1 << 16, 7),
        ("fill_async", workspace, 0, 1 << 16, 7),
    ]


def test_a_workspace_grows_and_is_given_back_in_the_streams_order(recorder: Recorder) -> None:
    workspace = cuda.Workspace(3, 7)
    first = workspace.reserve(1 << 20)
    assert workspace.reserve(1 << 16) == first
    second = workspace.reserve(1 << 21)
    workspace.close()
    workspace.close()
    assert [call for call in recorder.calls if call[0] != "set_device"] == [
        ("allocate_async", 1 << 20, 7),
        ("fill_async", first, 0, 1 << 16, 7),
        ("free_async", first, 7),
        ("allocate_async", 1 << 21, 7),
        ("fill_async", second, 0, 1 << 16, 7),
        ("free_async", second, 7),
    ]
    assert ("set_device", 3) in recorder.calls


ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "pool is an array": ("pool", {"pool": np.zeros(3)}),
    "pool is of integers": ("pool", {"pool": replace(POOL, dtype="int32")}),
    "pool has four dimensions": ("pool", {"pool": replace(POOL, shape=POOL.shape[1:])}),
    "pool without the K, V axis": ("pool", {"pool": replace(POOL, shape=(9, 3, 1, 2, 1024))}),
    "pool is empty": ("pool", {"pool": replace(POOL, shape=(0, 3, 2, 2, 1024))}),
    "block size is not a power of two": ("pool", {"pool": replace(POOL, shape=(9, 3, 2, 2, 64 * 12))}),
    "block size is 512": ("pool", {"pool": replace(POOL, shape=(9, 3, 2, 2, 64 * 512))}),
    "pool is nowhere": ("pool", {"pool": replace(POOL, pointer=0)}),
    "query is nowhere": ("query", {"query": replace(QUERY, pointer=0)}),
    "out is below zero": ("out", {"out": replace(OUT, pointer=-16)}),
    "layer is too large": ("layer", {"layer": 3}),
    "layer is negative": ("layer", {"layer": -1}),
    "layer is a float": ("layer", {"layer": 1.0}),
    "query has another dtype": ("query", {"query": replace(QUERY, dtype="float16")}),
    "query is of 8 bits": ("query", {"pool": FLOAT8_POOL, "query": replace(QUERY, dtype="float8_e4m3fn")}),
    "query is on another device": ("query", {"query": replace(QUERY, device=1)}),
    "query has two dimensions": ("query", {"query": replace(QUERY, shape=(3, 256))}),
    "head size does not fit": ("query", {"query": replace(QUERY, shape=(3, 4, 72))}),
    "head size is 24": ("query", {"query": replace(QUERY, shape=(3, 4, 24))}),
    "head size is 40 in 8 bits": (
        "query",
        {"pool": replace(FLOAT8_POOL, shape=(9, 3, 2, 2, 640)), "query": replace(QUERY, shape=(3, 4, 40))},
    ),
    "heads are no multiple of KV heads": ("query", {"query": replace(QUERY, shape=(3, 3, 64))}),
    "no heads": ("query", {"query": replace(QUERY, shape=(3, 0, 64))}),
    "query lengths are int64": ("query_lens", {"query_lens": DeviceArray(0, (2,), "int64", 0)}),
    "query lengths on the host": ("query_lens", {"query_lens": DeviceArray(0, (2,), "int32", HOST)}),
    "tables of three sequences": ("block_tables", {"block_tables": DeviceArray(0, (3, 5), "int32", 0)}),
    "tables have one dimension": ("block_tables", {"block_tables": DeviceArray(0, (2,), "int32", 0)}),
    "contexts of one sequence": ("context_lens", {"context_lens": DeviceArray(0, (1,), "int32", 0)}),
    "out has another shape": ("out", {"out": replace(OUT, shape=(2, 4, 64))}),
    "out has another dtype": ("out", {"out": replace(OUT, dtype="float32")}),
    "out is the query": ("out", {"out": QUERY}),
    "out overlaps the query": ("out", {"out": replace(QUERY, pointer=QUERY.pointer + QUERY.num_bytes - 2)}),
    "slopes of two heads": ("alibi_slopes", {"alibi_slopes": SCALE}),
    "scales of a 16-bit pool": ("k_scale", {"k_scale": SCALE}),
    "scales of four heads": ("v_scale", {"pool": FLOAT8_POOL, "v_scale": replace(SCALE, shape=(4,))}),
    "scales are float16": ("k_scale", {"pool": FLOAT8_POOL, "k_scale": replace(SCALE, dtype="float16")}),
    "lse of tokens": ("lse", {"lse": DeviceArray(0, (3,), "float32", 0)}),
    "longest query is negative": ("max_query_len", {"max_query_len": -1}),
    "longest query is missing": ("max_query_len", {"max_query_len": None}),
    "scale is NaN": ("scale", {"scale": float("nan")}),
    "scale is infinite as a float32": ("scale", {"scale": 1e300}),
    "scale is a string": ("scale", {"scale": "1"}),
    "window is negative": ("sliding_window", {"sliding_window": -1}),
    "window is huge": ("sliding_window", {"sliding_window": 2**63}),
    "soft cap is negative": ("logits_soft_cap", {"logits_soft_cap": -1.0}),
    "soft cap is infinite": ("logits_soft_cap", {"logits_soft_cap": float("inf")}),
    "a sparse field is a float": ("block_sparse", {"block_sparse": BlockSparse(2, 1.5)}),  # type: ignore[arg-type]
    "a sparse field is huge": ("block_sparse", {"block_sparse": BlockSparse(2**31, 1)}),
    "kernel is not known": ("kernel", {"kernel": "fastest"}),
}


def test_attention_names_the_wrong_argument(recorder: Recorder) -> None:
    with each_row() as row:
        for name, (field, changed) in ATTENTION.items():
            with row(name):
                with pytest.raises(InvalidArgumentError) as raised:
                    attend(**changed)
                assert raised.value.field == field
                assert not recorder.launched
    attend()
    assert len(recorder.launched) == 1


SLOTS = DeviceArray(256, (5,), "int64", 0)
TOKENS = DeviceArray(1 << 30, (5, 2, 64), "bfloat16", 0)
WRITE: dict[str, tuple[str, dict[str, Any]]] = {
    "slots are int32": ("slot_mapping", {"slot_mapping": replace(SLOTS, dtype="int32")}),
    "slots on another device": ("slot_mapping", {"slot_mapping": replace(SLOTS, device=1)}),
    "key of another count": ("key", {"key": replace(TOKENS, shape=(4, 2, 64))}),
    "key of three heads": ("key", {"key": replace(TOKENS, shape=(5, 3, 64))}),
    "key has another dtype": ("key", {"key": replace(TOKENS, dtype="float32")}),
    "key has another head size": ("key", {"key": replace(TOKENS, shape=(5, 2, 72))}),
    "value has another dtype": ("value", {"pool": FLOAT8_POOL, "value": replace(TOKENS, dtype="float16")}),
    "value of another head size": ("value", {"value": replace(TOKENS, shape=(5, 2, 32))}),
    "layer is too large": ("layer", {"layer": 3}),
    "scales of a 16-bit pool": ("v_scale", {"v_scale": SCALE}),
}


def test_write_and_read_name_the_wrong_argument(recorder: Recorder) -> None:
    with each_row() as row:
        for name, (field, changed) in WRITE.items():
            with row(name):
                arguments = {"pool": POOL, "layer": 0, "slot_mapping": SLOTS, "key": TOKENS, "value": TOKENS, **changed}
                with pytest.raises(InvalidArgumentError) as raised:
                    cuda.write_kv(**arguments, stream=7)
                assert raised.value.field == field
                arguments["slots"] = arguments.pop("slot_mapping")
                with pytest.raises(InvalidArgumentError) as raised:
                    cuda.read_kv(**arguments, stream=7)
                assert raised.value.field == {"slot_mapping": "slots"}.get(field, field)
                assert not recorder.calls


def test_write_and_read_hand_everything_on(recorder: Recorder) -> None:
    value = replace(TOKENS, pointer=1 << 31)
    cuda.write_kv(FLOAT8_POOL, 2, SLOTS, TOKENS, value, k_scale=SCALE, stream=7)
    cuda.read_kv(POOL, 2, SLOTS, key=TOKENS, value=value, stream=8)
    sizes = (9, 3, 2, 64, 16, 2, 5)
    assert recorder.calls == [
        ("set_device", 0),
        ("write_kv", 1 << 20, 3, *sizes, 256, 1 << 30, 1 << 31, 2, 4096, 0, 7),
        ("set_device", 0),
        ("read_kv", 1 << 20, 2, *sizes, 256, 1 << 30, 1 << 31, 2, 0, 0, 8),
    ]


IDS = np.array([0, 1], np.int32)
COPY: dict[str, tuple[str, dict[str, Any]]] = {
    "both pools in host memory": (
        "dst_pool",
        {"src_pool": replace(POOL, device=HOST), "dst_pool": replace(POOL, device=HOST)},
    ),
    "blocks of another size": ("dst_pool", {"dst_pool": replace(POOL, shape=(9, 3, 2, 2, 64 * 8))}),
    "blocks of another dtype": ("dst_pool", {"dst_pool": replace(POOL, dtype="float16")}),
    "ids are a list": ("src_ids", {"src_ids": [0, 1]}),
    "ids are int64": ("dst_ids", {"dst_ids": np.array([2, 3])}),
    "ids of another count": ("dst_ids", {"dst_ids": np.array([2], np.int32)}),
    "ids have two dimensions": ("src_ids", {"src_ids": IDS[None]}),
}


def test_copy_blocks_names_the_wrong_argument(recorder: Recorder) -> None:
    arguments: dict[str, Any] = {"src_pool": POOL, "dst_pool": POOL, "src_ids": IDS, "dst_ids": IDS + 2}
    with each_row() as row:
        for name, (field, changed) in COPY.items():
            with row(name):
                with pytest.raises(InvalidArgumentError) as raised:
                    cuda.copy_blocks(**arguments | changed, stream=7)
                assert raised.value.field == field
                assert not recorder.calls


def test_copy_blocks_hands_everything_on(recorder: Recorder) -> None:
    swap = DeviceArray(1 << 33, (50, *POOL.shape[1:]), POOL.dtype, HOST)
    strided = np.arange(8, dtype=np.int32)[::4]
    cuda.copy_blocks(POOL, swap, strided, IDS, stream=7)
    set_device, (name, *sizes, src_ids, dst_ids, stream) = recorder.calls
    assert set_device == ("set_device", 0)
    assert (name, sizes, stream) == ("copy_blocks", [1 << 20, 1 << 33, 9, 50, 3 * 2 * 2 * 64 * 16 * 2], 7)
    assert src_ids.flags.c_contiguous
    assert (src_ids.tolist(), dst_ids.tolist()) == ([0, 4], [0, 1])


def test_without_the_cuda_part_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvservice._cuda", None)
    monkeypatch.delattr(kvservice, "_cuda", raising=False)
    assert not cuda.available()
    with pytest.raises(FailedPreconditionError, match="kvservice was built without CUDA"):
        attend()
