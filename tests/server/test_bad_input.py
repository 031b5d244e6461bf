"""Requests that must be refused: the status, the reason and the field of each error. They must not change anything.

Every case is sent as a unary call and on the stream. Afterwards the daemon's statistics and all sequences are
unchanged, and an open step still accepts its layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvservice.v1 import attention_pb2, blocks_pb2, host_pb2, regions_pb2, tensor_pb2

HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 4, 2, 32, 2
MAX_TOKENS = 512
NO_ID = 2**63 - 1
OBJECT = f"kvservice-bad-input-{os.getpid()}"
OBJECT_BYTES = 8192

Allocation = blocks_pb2.SequenceAllocation


def tensor(*shape: int, data_type: int = tensor_pb2.DATA_TYPE_FLOAT32, num_bytes: int | None = None) -> Any:
    """Return a tensor of zeros. `num_bytes` overrides the size of its data, regardless of the shape."""
    size = 4 * math.prod(shape) if num_bytes is None else num_bytes
    return tensor_pb2.Tensor(data_type=data_type, shape=shape, inline=bytes(size))  # type: ignore[arg-type]


def attend(step_id: int, num_tokens: int, layer: int = 0, **changes: Any) -> attention_pb2.AttendRequest:
    fields = {
        "query": tensor(num_tokens, HEADS, HEAD_SIZE),
        "key": tensor(num_tokens, KV_HEADS, HEAD_SIZE),
        "value": tensor(num_tokens, KV_HEADS, HEAD_SIZE),
    }
    return attention_pb2.AttendRequest(step_id=step_id, layer=layer, **(fields | changes))


def write(step_id: int, num_tokens: int, layer: int | None = 0, **changes: Any) -> attention_pb2.WriteRequest:
    shape = (num_tokens, KV_HEADS, HEAD_SIZE) if layer is not None else (LAYERS, num_tokens, KV_HEADS, HEAD_SIZE)
    fields = {"key": tensor(*shape), "value": tensor(*shape)}
    return attention_pb2.WriteRequest(step_id=step_id, layer=layer, **(fields | changes))


def prompts(*requests: dict[str, Any], **more: Any) -> blocks_pb2.AllocateRequest:
    return blocks_pb2.AllocateRequest(sequences=[Allocation(**one) for one in requests], **more)


def read(sequence_id: int, start: int, stop: int, **more: Any) -> attention_pb2.ReadRequest:
    part = attention_pb2.SequenceRange(sequence_id=sequence_id, start=start, stop=stop)
    return attention_pb2.ReadRequest(ranges=[part], **more)


def region(**changes: Any) -> regions_pb2.RegisterRegionRequest:
    fields: dict[str, Any] = {"name": "new", "key": OBJECT, "offset": 0, "byte_size": 64}
    return regions_pb2.RegisterRegionRequest(**(fields | changes))


class Scene:
    """A session with sequences in every state, and a session of another client.

    full: 10 tokens, computed. prefill: 6 tokens in an open step. decode: 5 tokens, the last in an open step.
    half: 5 tokens, the last in a step whose first layer is written. swapped: 5 tokens, swapped out. freed: freed.
    ahead: two sequences of 2 tokens, with slots for 4 more in an open step ahead.
    Regions: "r" is the last 7168 bytes of the object; "shrunk" has 4096 bytes of an object that now has 100; "theirs"
    belongs to the other session. This session has a lane and has mapped the pool for writing; the other has not.
    """

    full, prefill, decode, half, swapped, freed, foreign = 1, 2, 3, 4, 5, 6, 70
    ahead = 8, 9

    def __init__(self, session: Any, other: Any) -> None:
        self.session, self.other = session, other
        self.make(session, self.full, range(10), computed=True)
        self.make(session, self.decode, range(100, 104), computed=True)
        self.make(session, self.half, range(200, 204), computed=True)
        self.make(session, self.swapped, range(300, 305), computed=True)
        self.make(session, self.freed, range(400, 402), computed=True)
        self.make(session, self.prefill, range(500, 506), computed=False)
        self.make(other, self.foreign, range(600, 605), computed=False)
        self.stale_step = self.append(self.decode, 7)
        session.ok("truncate", blocks_pb2.TruncateRequest(sequence_ids=[self.decode], lengths=[4]))
        self.decode_step = self.append(self.decode, 7)
        self.half_step = self.append(self.half, 7)
        session.ok("decode", attend(self.half_step, 1))
        self.prefill_step = session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[self.prefill])).step_id
        for _ in range(30):  # so that the other session has higher step ids
            step = other.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[self.foreign]))
        self.foreign_step = step.step_id
        session.ok("swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[self.swapped]))
        session.ok("free", blocks_pb2.FreeRequest(sequence_ids=[self.freed]))
        session.ok("register_region", region(name="r", offset=1024, byte_size=OBJECT_BYTES - 1024))
        shrinking = Path("/dev/shm", f"{OBJECT}-shrinking")
        shrinking.write_bytes(bytes(4096))
        session.ok("register_region", region(name="shrunk", key=shrinking.name, byte_size=4096))
        os.truncate(shrinking, 100)
        shrinking.unlink()
        other.ok("register_region", region(name="theirs"))
        session.ok("open_lane", host_pb2.OpenLaneRequest())
        session.ok("map_pool", host_pb2.MapPoolRequest(writable=True))
        for sequence_id in self.ahead:
            self.make(session, sequence_id, range(700, 702), computed=True)
        request = blocks_pb2.OpenAheadRequest(sequence_ids=self.ahead, num_steps=4)
        self.ahead_step = session.ok("open_ahead", request).step_id

    def make(self, session: Any, sequence_id: int, token_ids: range, *, computed: bool) -> None:
        session.ok("allocate", prompts({"sequence_id": sequence_id, "token_ids": token_ids}))
        if computed:
            step = session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
            session.ok("write", write(step.step_id, sum(step.query_lens), layer=None))

    def append(self, sequence_id: int, token_id: int) -> int:
        request = blocks_pb2.AppendRequest(sequence_ids=[sequence_id], token_ids=[token_id])
        step_id: int = self.session.ok("append", request).step_id
        return step_id

    def state(self) -> tuple[Any, ...]:
        return (
            self.session.wire.stats(), self.session.describe(), self.other.describe(),
            self.session.ok("list_regions", regions_pb2.ListRegionsRequest()),
        )  # fmt: skip

    def check_working(self) -> None:
        """Check that the open steps can be completed and are then computed."""
        self.session.ok("decode", attend(self.half_step, 1, layer=1))
        for layer in range(LAYERS):
            self.session.ok("decode", attend(self.decode_step, 1, layer))
            self.session.ok("extend", attend(self.prefill_step, 6, layer))
        for info in self.session.describe().sequences:
            assert info.num_computed_tokens == info.length


@pytest.fixture
def scene(raw: Any, wire: Any) -> Iterator[Scene]:
    raw.await_no_sessions(wire)
    session, other = raw.RawSession(wire), raw.RawSession(wire)
    path = Path("/dev/shm", OBJECT)
    path.write_bytes(bytes(OBJECT_BYTES))
    yield Scene(session, other)
    path.unlink()
    session.ok("reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
    session.close()
    other.close()


@dataclass(frozen=True)
class Case:
    name: str
    method: str
    request: Any  # makes the request from the scene; lambdas have loop variables as further arguments with defaults
    reason: str
    field: str
    code: str = ""

    @property
    def status(self) -> str:
        return self.code or STATUS_OF.get(self.reason, "FAILED_PRECONDITION")


STATUS_OF = {
    "INVALID_ARGUMENT": "INVALID_ARGUMENT",
    "UNKNOWN_SEQUENCE": "NOT_FOUND",
    "UNKNOWN_STEP": "NOT_FOUND",
    "UNKNOWN_PIN": "NOT_FOUND",
    "UNKNOWN_REGION": "NOT_FOUND",
    "DUPLICATE_SEQUENCE": "ALREADY_EXISTS",
    "DUPLICATE_REGION": "ALREADY_EXISTS",
    "OUT_OF_BLOCKS": "RESOURCE_EXHAUSTED",
    "QUOTA_EXCEEDED": "RESOURCE_EXHAUSTED",
}
INVALID = "INVALID_ARGUMENT"
Ids = blocks_pb2.FreeRequest


def allocate_cases() -> Iterator[Case]:
    def case(name: str, reason: str, field: str, *requests: dict[str, Any], **more: Any) -> Case:
        return Case(f"allocate {name}", "allocate", lambda _: prompts(*requests, **more), reason, field)

    good = {"sequence_id": 10, "token_ids": [1, 2]}
    yield case("nothing", INVALID, "sequences")
    yield case("no tokens", INVALID, "sequences[0].token_ids", {"sequence_id": 10})
    yield case("no tokens, second", INVALID, "sequences[1].token_ids", good, {"sequence_id": 11})
    yield case("negative token", INVALID, "sequences[0].token_ids[1]", {"sequence_id": 10, "token_ids": [1, -2]})
    yield case("negative id", INVALID, "sequences[0].sequence_id", good | {"sequence_id": -1})
    yield case("smallest id", INVALID, "sequences[1].sequence_id", good, good | {"sequence_id": -(2**63)})
    yield case("id in use", "DUPLICATE_SEQUENCE", "sequences[0].sequence_id", good | {"sequence_id": Scene.full})
    yield case("id of a swapped one", "DUPLICATE_SEQUENCE", "sequences[0].sequence_id", good | {"sequence_id": 5})
    yield case("equal ids", "DUPLICATE_SEQUENCE", "sequences[1].sequence_id", good, good)
    yield case("too long", INVALID, "sequences[0].token_ids", good | {"token_ids": range(MAX_TOKENS + 1)})
    yield case("second too long", INVALID, "sequences[1].token_ids", good, {"token_ids": range(MAX_TOKENS + 1)})
    yield case("negative lookahead", INVALID, "lookahead", good, lookahead=-1)
    yield case("huge lookahead", INVALID, "lookahead", good, lookahead=2**31 - 1)
    keys = ((-1, b"x"), (2**63 - 1, b"x"), (MAX_TOKENS, b"x"), (0, b""), (0, bytes(1025)))
    for position, key in keys:
        bad = blocks_pb2.ExtraKey(position=position, key=key)
        name = f"extra key of {len(key)} bytes at {position}"
        yield case(name, INVALID, "sequences[0].extra_keys[0]", good | {"extra_keys": [bad]})
    many = [blocks_pb2.ExtraKey(key=b"x")] * 4097
    yield case("many extra keys", INVALID, "sequences.extra_keys", good | {"extra_keys": many})
    half = [{"sequence_id": 10 + i, "token_ids": range(100)} for i in range(4)]
    yield case("out of blocks in the batch", "OUT_OF_BLOCKS", "", *half)
    most = [{"sequence_id": 10 + i, "token_ids": [1]} for i in range(60)]
    yield case("too many sequences", "QUOTA_EXCEEDED", "sequences", *most)


def can_allocate_cases() -> Iterator[Case]:
    def request(**changes: Any) -> Callable[[Scene], Any]:
        fields: dict[str, Any] = {"sequence_id": 10, "token_ids": [1]}
        one = Allocation(**(fields | changes))
        return lambda _: blocks_pb2.CanAllocateRequest(sequences=[one])

    yield Case("can_allocate nothing", "can_allocate", lambda _: blocks_pb2.CanAllocateRequest(), INVALID, "sequences")
    yield Case(
        "can_allocate no tokens", "can_allocate", request(token_ids=[]), INVALID, "sequences[0].token_ids"
    )  # fmt: skip
    yield Case(
        "can_allocate id in use", "can_allocate", request(sequence_id=1), "DUPLICATE_SEQUENCE",
        "sequences[0].sequence_id",
    )  # fmt: skip


def id_cases() -> Iterator[Case]:
    """Yield wrong sequence ids for every call that takes sequence ids."""
    makers: dict[str, Callable[[list[int]], Any]] = {
        "append": lambda ids: blocks_pb2.AppendRequest(sequence_ids=ids, token_ids=[1] * len(ids)),
        "can_append": lambda ids: blocks_pb2.CanAppendRequest(sequence_ids=ids),
        "open_step": lambda ids: blocks_pb2.OpenStepRequest(sequence_ids=ids),
        "open_ahead": lambda ids: blocks_pb2.OpenAheadRequest(sequence_ids=ids, num_steps=1),
        "truncate": lambda ids: blocks_pb2.TruncateRequest(sequence_ids=ids, lengths=[1] * len(ids)),
        "swap_out": lambda ids: blocks_pb2.SwapOutRequest(sequence_ids=ids),
        "can_swap_out": lambda ids: blocks_pb2.CanSwapOutRequest(sequence_ids=ids),
        "swap_in": lambda ids: blocks_pb2.SwapInRequest(sequence_ids=ids),
        "can_swap_in": lambda ids: blocks_pb2.CanSwapInRequest(sequence_ids=ids),
        "free": lambda ids: blocks_pb2.FreeRequest(sequence_ids=ids),
        "common_prefix": lambda ids: blocks_pb2.CommonPrefixRequest(sequence_ids=ids),
        "describe": lambda ids: blocks_pb2.DescribeRequest(sequence_ids=ids),
    }
    batches: dict[str, tuple[list[int], str, str]] = {
        "nobody": ([], INVALID, "sequence_ids"),
        "unknown": ([Scene.full, NO_ID], "UNKNOWN_SEQUENCE", "sequence_ids[1]"),
        "negative": ([-1], INVALID, "sequence_ids[0]"),
        "smallest": ([-(2**63)], INVALID, "sequence_ids[0]"),
        "somebody else's": ([Scene.foreign], "UNKNOWN_SEQUENCE", "sequence_ids[0]"),
        "freed": ([Scene.freed], "UNKNOWN_SEQUENCE", "sequence_ids[0]"),
        "twice": ([Scene.full, Scene.full], INVALID, "sequence_ids[1]"),
        "swapped": ([Scene.swapped], "SEQUENCE_SWAPPED", "sequence_ids[0]"),
    }
    answered = {("describe", "nobody"), ("describe", "swapped"), ("swap_in", "swapped"), ("free", "swapped")} | {
        ("can_swap_in", "swapped")
    }
    for method, make in makers.items():
        for name, (ids, reason, field) in batches.items():
            if (method, name) not in answered:
                yield Case(f"{method} {name}", method, lambda _, make=make, ids=ids: make(ids), reason, field)
    for method in ("swap_in", "can_swap_in"):
        yield Case(
            f"{method} of a resident one", method, lambda _, method=method: makers[method]([Scene.full]),
            "SEQUENCE_NOT_SWAPPED", "sequence_ids[0]",
        )  # fmt: skip


def step_cases() -> Iterator[Case]:
    def append(name: str, reason: str, field: str, **fields: Any) -> Case:
        request = {"sequence_ids": [Scene.full], "token_ids": [1]} | fields
        return Case(f"append {name}", "append", lambda _: blocks_pb2.AppendRequest(**request), reason, field)

    def open_step(name: str, reason: str, field: str, **fields: Any) -> Case:
        return Case(f"open_step {name}", "open_step", lambda _: blocks_pb2.OpenStepRequest(**fields), reason, field)

    yield append("negative token", INVALID, "token_ids[0]", token_ids=[-1])
    yield append("no tokens", INVALID, "token_ids", token_ids=[])
    yield append("tokens for two", INVALID, "token_ids", token_ids=[1, 2])
    yield append("zero tokens", INVALID, "num_tokens[0]", num_tokens=[0])
    yield append("negative count", INVALID, "num_tokens[0]", num_tokens=[-(2**31)])
    yield append("huge count", INVALID, "num_tokens[0]", num_tokens=[2**31 - 1])
    yield append("two counts", INVALID, "num_tokens", num_tokens=[1, 1])
    yield append("wrong length", "LENGTH_MISMATCH", "expected_lengths[0]", expected_lengths=[9])
    yield append("two lengths", INVALID, "expected_lengths", expected_lengths=[10, 10])
    yield append("negative length", INVALID, "expected_lengths[0]", expected_lengths=[-1])
    yield append("negative lookahead", INVALID, "lookahead", lookahead=-1)
    yield append("huge lookahead", INVALID, "lookahead", lookahead=2**31 - 1)
    yield append("lookahead past the longest", INVALID, "lookahead[0]", lookahead=502)
    yield append("past the longest", INVALID, "token_ids[0]", token_ids=[1] * 503, num_tokens=[503])
    yield append("out of blocks", "OUT_OF_BLOCKS", "", token_ids=[1] * 300, num_tokens=[300])
    yield append(
        "out of blocks in the batch", "OUT_OF_BLOCKS", "", sequence_ids=[1, 3, 4], token_ids=[1] * 240,
        num_tokens=[1, 1, 238],
    )  # fmt: skip
    yield open_step("all computed", "FAILED_PRECONDITION", "sequence_ids[0]", sequence_ids=[Scene.full])
    yield open_step("one all computed", "FAILED_PRECONDITION", "sequence_ids[1]", sequence_ids=[2, 1])
    for count in (0, -1, 7, 2**31 - 1):
        yield open_step(f"{count} tokens", INVALID, "num_tokens[0]", sequence_ids=[2], num_tokens=[count])
    yield open_step("two counts", INVALID, "num_tokens", sequence_ids=[2], num_tokens=[1, 1])


def ahead_cases() -> Iterator[Case]:
    """Steps ahead; that of the scene is over the next four tokens of two sequences."""

    def opening(
        name: str, reason: str, field: str, *ids: int, num_steps: int = 1, lengths: tuple[int, ...] = ()
    ) -> Case:
        request = blocks_pb2.OpenAheadRequest(sequence_ids=ids, num_steps=num_steps, expected_lengths=lengths)
        return Case(f"open_ahead {name}", "open_ahead", lambda _: request, reason, field)

    def commit(name: str, reason: str, field: str, **fields: Any) -> Case:
        def request(scene: Scene) -> blocks_pb2.CommitAheadRequest:
            return blocks_pb2.CommitAheadRequest(**{"step_id": scene.ahead_step, "token_ids": [1, 2]} | fields)

        return Case(f"commit_ahead {name}", "commit_ahead", request, reason, field)

    for num_steps in (0, -1, -(2**31), 503, 2**31 - 1):
        yield opening(f"{num_steps} steps", INVALID, "num_steps", Scene.full, num_steps=num_steps)
    yield opening("out of blocks", "OUT_OF_BLOCKS", "", Scene.full, num_steps=400)
    yield opening("wrong length", "LENGTH_MISMATCH", "expected_lengths[0]", Scene.full, lengths=(9,))
    yield opening("two lengths", INVALID, "expected_lengths", Scene.full, lengths=(10, 10))
    yield opening("negative length", INVALID, "expected_lengths[0]", Scene.full, lengths=(-1,))
    yield opening("pending tokens", "FAILED_PRECONDITION", "sequence_ids[1]", Scene.full, Scene.prefill)
    yield commit("of no step", INVALID, "step_id", step_id=-1)
    yield commit("of an unknown step", "UNKNOWN_STEP", "step_id", step_id=2**63 - 1)
    yield Case(
        "commit_ahead of another step", "commit_ahead",
        lambda s: blocks_pb2.CommitAheadRequest(step_id=s.decode_step, token_ids=[1]), "FAILED_PRECONDITION", "step_id",
    )  # fmt: skip
    yield commit("odd tokens", INVALID, "token_ids", token_ids=[1, 2, 3])
    yield commit("too many tokens", INVALID, "token_ids", token_ids=[1] * 10)
    yield commit("negative token", INVALID, "token_ids[1]", token_ids=[1, -1])
    yield commit("tokens for another count", INVALID, "token_ids", num_tokens=[1, 2])
    yield commit("one count", INVALID, "num_tokens", num_tokens=[2])
    yield commit("negative count", INVALID, "num_tokens[1]", num_tokens=[3, -1])
    yield commit("huge count", INVALID, "num_tokens[0]", num_tokens=[2**31 - 1, 0])
    for num_steps in (-1, -(2**31), 510, 2**31 - 1):
        yield commit(f"{num_steps} next steps", INVALID, "num_steps", num_steps=num_steps)
    yield commit("out of blocks", "OUT_OF_BLOCKS", "", num_steps=300)
    yield Case("extend of a step ahead", "extend", lambda s: attend(s.ahead_step, 8), "FAILED_PRECONDITION", "step_id")
    yield Case(
        "commit of a step ahead", "commit", lambda s: host_pb2.CommitRequest(step_id=s.ahead_step),
        "FAILED_PRECONDITION", "step_id",
    )  # fmt: skip


def sharing_cases() -> Iterator[Case]:
    def fork(name: str, reason: str, field: str, parents: list[int], children: list[int]) -> Case:
        request = blocks_pb2.ForkRequest(parent_ids=parents, child_ids=children)
        return Case(f"fork {name}", "fork", lambda _: request, reason, field)

    def truncate(name: str, reason: str, field: str, lengths: list[int]) -> Case:
        request = blocks_pb2.TruncateRequest(sequence_ids=[Scene.full], lengths=lengths)
        return Case(f"truncate {name}", "truncate", lambda _: request, reason, field)

    yield fork("nobody", INVALID, "parent_ids", [], [])
    yield fork("without children", INVALID, "child_ids", [1], [])
    yield fork("more children", INVALID, "child_ids", [1], [10, 11])
    yield fork("unknown parent", "UNKNOWN_SEQUENCE", "parent_ids[1]", [1, 99], [10, 11])
    yield fork("foreign parent", "UNKNOWN_SEQUENCE", "parent_ids[0]", [Scene.foreign], [10])
    yield fork("swapped parent", "SEQUENCE_SWAPPED", "parent_ids[1]", [1, 5], [10, 11])
    yield fork("child in use", "DUPLICATE_SEQUENCE", "child_ids[1]", [1, 1], [10, 2])
    yield fork("equal children", "DUPLICATE_SEQUENCE", "child_ids[1]", [1, 1], [10, 10])
    yield fork("negative child", INVALID, "child_ids[0]", [1], [-1])
    yield fork("too many", "QUOTA_EXCEEDED", "child_ids", [1] * 60, list(range(10, 70)))
    yield truncate("to more", INVALID, "lengths[0]", [11])
    yield truncate("to less than nothing", INVALID, "lengths[0]", [-1])
    yield truncate("without lengths", INVALID, "lengths", [])
    yield truncate("to the largest number", INVALID, "lengths[0]", [2**63 - 1])


def pin_cases() -> Iterator[Case]:
    def pin(name: str, reason: str, field: str, **fields: Any) -> Case:
        usual: dict[str, Any] = {"token_ids": range(10), "ttl_s": 1.0}
        request = blocks_pb2.PinRequest(**(usual | fields))
        return Case(f"pin {name}", "pin", lambda _: request, reason, field)

    for ttl in (0.0, -1.0, math.nan, math.inf, -math.inf):
        yield pin(f"for {ttl} s", INVALID, "ttl_s", ttl_s=ttl)
    yield pin("nothing", INVALID, "token_ids", token_ids=[])
    yield pin("negative token", INVALID, "token_ids[0]", token_ids=[-1])
    yield pin("what is not cached", "NOT_COMPUTED", "token_ids", token_ids=[9, 9, 9, 9, 9])
    bad = blocks_pb2.ExtraKey(position=-1, key=b"x")
    yield pin("extra key", INVALID, "extra_keys[0]", extra_keys=[bad])
    for pin_id, reason in ((1, "UNKNOWN_PIN"), (0, "UNKNOWN_PIN"), (NO_ID, "UNKNOWN_PIN"), (-1, INVALID)):
        request = blocks_pb2.UnpinRequest(pin_id=pin_id)
        yield Case(f"unpin {pin_id}", "unpin", lambda _, request=request: request, reason, "pin_id")
    for tokens, field in (([], "token_ids"), ([-5], "token_ids[0]"), (range(513), "token_ids")):
        match = blocks_pb2.MatchPrefixRequest(token_ids=tokens)
        yield Case(
            f"match_prefix of {len(tokens)}", "match_prefix", lambda _, match=match: match, INVALID, field
        )  # fmt: skip


def step_id_cases() -> Iterator[Case]:
    """Yield wrong steps and layers for decode, extend and write."""
    makers: dict[str, Callable[..., Any]] = {"decode": attend, "extend": attend, "write": write}
    for method, make in makers.items():

        def case(name: str, request: Any, reason: str, field: str, method: str = method) -> Case:
            return Case(f"{method} {name}", method, request, reason, field)

        yield case("stale step", lambda s, m=make: m(s.stale_step, 1), "STALE_STEP", "step_id")
        yield case("step 0", lambda _, m=make: m(0, 1), "UNKNOWN_STEP", "step_id")
        yield case("negative step", lambda _, m=make: m(-1, 1), INVALID, "step_id")
        yield case("unknown step", lambda _, m=make: m(NO_ID, 1), "UNKNOWN_STEP", "step_id")
        yield case("somebody else's step", lambda s, m=make: m(s.foreign_step, 5), "UNKNOWN_STEP", "step_id")
        yield case("layer twice", lambda s, m=make: m(s.half_step, 1, 0), "LAYER_WRITTEN", "layer")
        for layer in (-1, LAYERS, 2**31 - 1, -(2**31)):
            yield case(f"layer {layer}", lambda s, m=make, n=layer: m(s.decode_step, 1, n), INVALID, "layer")
    yield Case("decode a prefill", "decode", lambda s: attend(s.prefill_step, 6), INVALID, "step_id")
    yield Case("write all after one", "write", lambda s: write(s.half_step, 1, None), "LAYER_WRITTEN", "layer")


def tensor_cases() -> Iterator[Case]:
    """Yield tensors that do not match the step, the pool or their own shape. The step has one token."""
    shapes = {
        "query": (1, HEADS, HEAD_SIZE),
        "key": (1, KV_HEADS, HEAD_SIZE),
        "value": (1, KV_HEADS, HEAD_SIZE),
    }
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        wrong = {
            "too few tokens": (tensor(0, *shape[1:]), "shape"),
            "too many tokens": (tensor(2, *shape[1:]), "shape"),
            "no heads": (tensor(1, 0, HEAD_SIZE), "shape"),
            "odd heads": (tensor(1, 3, HEAD_SIZE), "shape"),
            "other head size": (tensor(1, shape[1], 64), "shape"),
            "flat": (tensor(math.prod(shape)), "shape"),
            "no dimensions": (tensor(num_bytes=4), "shape"),
            "four dimensions": (tensor(1, *shape), "shape"),
            "nine dimensions": (tensor(1, 1, 1, 1, 1, 1, *shape), "shape"),
            "negative extents": (tensor(-1, -shape[1], HEAD_SIZE, num_bytes=size), "shape"),
            "a product past 64 bits": (tensor(2**62, 4, HEAD_SIZE, num_bytes=size), "inline"),
            "a product of 0 past 64 bits": (tensor(0, 2**62, 2**62, num_bytes=0), "shape"),
            "extents of 63 bits": (tensor(*([2**63 - 1] * 8), num_bytes=size), "inline"),
            "a byte too few": (tensor(*shape, num_bytes=size - 1), "inline"),
            "a byte too many": (tensor(*shape, num_bytes=size + 1), "inline"),
            "no bytes": (tensor(*shape, num_bytes=0), "inline"),
            "no type": (tensor(*shape, data_type=0), "data_type"),
            "an unknown type": (tensor(*shape, data_type=99), "data_type"),
            "half the type": (tensor(*shape, data_type=2, num_bytes=size // 2), "data_type"),
            "nothing": (tensor_pb2.Tensor(), "data_type"),
        }
        for what, (bad, field) in wrong.items():
            changes = {name: bad}
            for method, make in (("decode", attend), ("extend", attend), ("write", write)):
                if method != "write" or name != "query":
                    request = lambda s, make=make, changes=changes: make(s.decode_step, 1, **changes)  # noqa: E731
                    yield Case(f"{method} {name} {what}", method, request, INVALID, f"{name}.{field}")
    one_layer = {"key": tensor(1, KV_HEADS, HEAD_SIZE)}
    yield Case(
        "write one layer as all", "write", lambda s: write(s.decode_step, 1, None, **one_layer), INVALID, "key.shape"
    )  # fmt: skip


def option_cases() -> Iterator[Case]:
    bad: dict[str, list[Any]] = {
        "scale": [math.nan, math.inf, -math.inf],
        "sliding_window": [-1, -(2**31)],
        "logits_soft_cap": [math.nan, math.inf, -1.0],
        "alibi_slopes": [[1.0], [1.0] * 5, [1.0, 1.0, 1.0, math.nan], [math.inf] * 4],
    }
    for name, values in bad.items():
        for value in values:
            options = attention_pb2.AttentionOptions(**{name: value})
            yield Case(
                f"{name} {value}",
                "extend",
                lambda s, o=options: attend(s.decode_step, 1, options=o),
                INVALID,
                f"options.{name}",
            )


def sparse_cases() -> Iterator[Case]:
    good = {"vert_stride": 2, "local_blocks": 1, "block_size": 8}
    for name, value in (
        ("vert_stride", -1),
        ("local_blocks", -1),
        ("local_blocks", 0),
        ("block_size", 0),
        ("tp_rank", -1),
    ):
        sparse = attention_pb2.BlockSparse(**(good | {name: value}))
        options = attention_pb2.AttentionOptions(block_sparse=sparse)
        yield Case(
            f"block_sparse.{name} {value}",
            "extend",
            lambda s, o=options: attend(s.decode_step, 1, options=o),
            INVALID,
            f"options.block_sparse.{name}",
        )


def read_cases() -> Iterator[Case]:
    def case(name: str, reason: str, field: str, *args: int, **more: Any) -> Case:
        return Case(f"read {name}", "read", lambda _: read(*args, **more), reason, field)

    yield Case("read nothing", "read", lambda _: attention_pb2.ReadRequest(), INVALID, "ranges")
    yield case("unknown", "UNKNOWN_SEQUENCE", "ranges[0].sequence_id", 99, 0, 1)
    yield case("somebody else's", "UNKNOWN_SEQUENCE", "ranges[0].sequence_id", Scene.foreign, 0, 1)
    yield case("negative", INVALID, "ranges[0].sequence_id", -1, 0, 1)
    yield case("swapped", "SEQUENCE_SWAPPED", "ranges[0].sequence_id", Scene.swapped, 0, 1)
    yield case("past the end", INVALID, "ranges[0].stop", Scene.full, 0, 11)
    yield case("past the last number", INVALID, "ranges", Scene.full, 0, 2**63 - 1)
    yield case("backwards", INVALID, "ranges[0].start", Scene.full, 5, 4)
    yield case("from before", INVALID, "ranges[0].start", Scene.full, -1, 4)
    yield case("from far before", INVALID, "ranges", Scene.full, -(2**63), 4)
    yield case("what is not computed", "NOT_COMPUTED", "ranges[0].stop", Scene.prefill, 0, 1)
    yield case("the pending token", "NOT_COMPUTED", "ranges[0].stop", Scene.decode, 0, 5)
    for layer in (-1, LAYERS, 2**31 - 1):
        yield case(f"layer {layer}", INVALID, "layer", Scene.full, 0, 1, layer=layer)
    both = [attention_pb2.SequenceRange(sequence_id=n, start=0, stop=1) for n in (Scene.full, 99)]
    yield Case(
        "read two, one unknown", "read", lambda _: attention_pb2.ReadRequest(ranges=both), "UNKNOWN_SEQUENCE",
        "ranges[1].sequence_id",
    )  # fmt: skip
    large = [attention_pb2.SequenceRange(sequence_id=Scene.full, start=0, stop=10)] * 500
    yield Case(
        "read more than a message holds", "read", lambda _: attention_pb2.ReadRequest(ranges=large), INVALID, "ranges"
    )  # fmt: skip


def region_cases() -> Iterator[Case]:
    def register(what: str, reason: str, field: str, **changes: Any) -> Case:
        return Case(f"register {what}", "register_region", lambda _: region(**changes), reason, field)

    yield register("no name", INVALID, "name", name="")
    yield register("a long name", INVALID, "name", name="n" * 257)
    yield register("a name in use", "DUPLICATE_REGION", "name", name="r")
    for key in ("", "/", ".", "..", "/.", "/..", "a/b", "//a", "/a/", f"../shm/{OBJECT}", "a\0b", "k" * 256, "ä" * 128):
        yield register(f"key {key[:20]!r} of {len(key)}", INVALID, "key", key=key)
    yield register("no such object", "REGION_NOT_OPENED", "key", key=f"{OBJECT}-none")
    for offset in (OBJECT_BYTES, 2**63, 2**64 - 1):
        yield register(f"offset {offset}", INVALID, "offset", offset=offset)
    for offset, byte_size in ((0, 0), (0, OBJECT_BYTES + 1), (1, OBJECT_BYTES), (1, 2**64 - 1), (8191, 2**63)):
        yield register(f"{byte_size} at {offset}", INVALID, "byte_size", offset=offset, byte_size=byte_size)


def place_cases() -> Iterator[Case]:
    """Yield wrong places of inputs and outputs. The step has one token."""
    limit = OBJECT_BYTES - 1024
    sizes = {"query": (1, HEADS, HEAD_SIZE), "key": (1, KV_HEADS, HEAD_SIZE), "value": (1, KV_HEADS, HEAD_SIZE)}
    for name, shape in sizes.items():
        size = 4 * math.prod(shape)
        wrong: dict[str, tuple[dict[str, Any], str, str]] = {
            "no region": ({"region": ""}, "UNKNOWN_REGION", "region"),
            "unknown region": ({"region": "none"}, "UNKNOWN_REGION", "region"),
            "another's region": ({"region": "theirs"}, "UNKNOWN_REGION", "region"),
            "a region that has shrunk": ({"region": "shrunk"}, "REGION_SHRUNK", "byte_size"),
            "offset past the end": ({"offset": limit}, INVALID, "offset"),
            "huge offset": ({"offset": 2**64 - 1}, INVALID, "offset"),
            "end past the end": ({"offset": limit - size + 1}, INVALID, "byte_size"),
            "a byte too few": ({"byte_size": size - 1}, INVALID, "byte_size"),
            "huge": ({"byte_size": 2**64 - 1}, INVALID, "byte_size"),
        }
        for what, (changes, reason, field) in wrong.items():
            usual: dict[str, Any] = {"region": "r", "offset": 8, "byte_size": size}
            place = tensor_pb2.SharedMemoryPlace(**(usual | changes))
            bad = tensor_pb2.Tensor(data_type=1, shape=shape, shared_memory=place)  # type: ignore[arg-type]
            for method, make in (("extend", attend), ("write", write)):
                if method != "write" or name != "query":
                    request: Any = lambda s, make=make, bad={name: bad}: make(s.decode_step, 1, **bad)  # noqa: E731
                    yield Case(f"{method} {name} at {what}", method, request, reason, f"{name}.shared_memory.{field}")
    for name, size in (("output_place", 4 * HEADS * HEAD_SIZE), ("lse_place", 4 * HEADS)):
        wrong = {
            "unknown region": ({"region": "none"}, "UNKNOWN_REGION", "region"),
            "a region that has shrunk": ({"region": "shrunk", "offset": 100}, "REGION_SHRUNK", "byte_size"),
            "offset past the end": ({"offset": limit}, INVALID, "offset"),
            "end past the end": ({"offset": limit - size + 1}, INVALID, "byte_size"),
            "a byte too few": ({"byte_size": size - 1}, INVALID, "byte_size"),
        }
        for what, (changes, reason, field) in wrong.items():
            usual = {"region": "r", "offset": 8, "byte_size": size}
            place = tensor_pb2.SharedMemoryPlace(**(usual | changes))
            request = lambda s, to={name: place}: attend(s.decode_step, 1, return_lse=True, **to)  # noqa: E731
            yield Case(f"extend {name} {what}", "extend", request, reason, f"{name}.{field}")
    place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=64)
    request = lambda s: attend(s.decode_step, 1, lse_place=place)  # noqa: E731
    yield Case("extend lse_place without return_lse", "extend", request, INVALID, "lse_place")


def host_cases() -> Iterator[Case]:
    """Yield cases for regions made by the daemon, GPU regions, the lane and the mapped pool."""

    def create(what: str, reason: str, field: str, **changes: Any) -> Case:
        usual: dict[str, Any] = {"name": "new", "byte_size": 4096}
        request = regions_pb2.CreateRegionRequest(**(usual | changes))
        return Case(f"create {what}", "create_region", lambda _: request, reason, field)

    yield create("no name", INVALID, "name", name="")
    yield create("a long name", INVALID, "name", name="n" * 257)
    yield create("a name in use", "DUPLICATE_REGION", "name", name="r")
    yield create("nothing", INVALID, "byte_size", byte_size=0)
    for byte_size in ((32 << 20) + 1, 2**63, 2**64 - 1):
        yield create(f"{byte_size} bytes", "QUOTA_EXCEEDED", "byte_size", byte_size=byte_size)
    gpu: dict[str, Any] = {"name": "new", "raw_handle": bytes(64), "byte_size": 64}
    for what, changes, reason, field in (
        ("a name in use", {"name": "r"}, "DUPLICATE_REGION", "name"),
        ("no name", {"name": ""}, INVALID, "name"),
    ):
        request = regions_pb2.RegisterCudaRegionRequest(**(gpu | changes))
        yield Case(f"cuda register {what}", "register_cuda_region", lambda _, r=request: r, reason, field)
    yield Case("a second lane", "open_lane", lambda _: host_pb2.OpenLaneRequest(), "FAILED_PRECONDITION", "")
    commits: dict[str, tuple[Callable[[Scene], int], str, str]] = {
        "stale step": (lambda s: s.stale_step, "STALE_STEP", "step_id"),
        "step 0": (lambda _: 0, "UNKNOWN_STEP", "step_id"),
        "negative step": (lambda _: -1, INVALID, "step_id"),
        "unknown step": (lambda _: NO_ID, "UNKNOWN_STEP", "step_id"),
        "somebody else's step": (lambda s: s.foreign_step, "UNKNOWN_STEP", "step_id"),
        "a step with a layer sent": (lambda s: s.half_step, "LAYER_WRITTEN", "layer"),
    }
    for what, (step_id, reason, field) in commits.items():
        make = lambda s, step_id=step_id: host_pb2.CommitRequest(step_id=step_id(s))  # noqa: E731
        yield Case(f"commit {what}", "commit", make, reason, field)


MAKERS = (
    allocate_cases, can_allocate_cases, id_cases, step_cases, ahead_cases, sharing_cases, pin_cases, step_id_cases,
    tensor_cases, option_cases, sparse_cases, read_cases, region_cases, place_cases, host_cases,
)  # fmt: skip


def all_cases() -> Iterator[Case]:
    for make in MAKERS:
        yield from make()


@pytest.mark.parametrize("transport", ["unary", "stream"])
def test_is_refused_and_changes_nothing(scene: Scene, transport: str) -> None:
    before = scene.state()
    wrong: list[str] = []
    for case in all_cases():
        answer = scene.session.call(case.method, case.request(scene), transport)
        expected = (case.status, case.reason, case.field)
        found = (getattr(answer, "code", "OK"), getattr(answer, "reason", ""), getattr(answer, "field", ""))
        if found != expected:
            wrong.append(f"{case.name}: {found}, not {expected}")
            continue
        details = {"ErrorInfo"} | ({"BadRequest"} if case.field else set())
        details |= {"QUOTA_EXCEEDED": {"QuotaFailure"}}.get(case.reason, set())
        if answer.details - {"RetryInfo"} != details:
            wrong.append(f"{case.name}: has {sorted(answer.details)}, not {sorted(details)}")
        if scene.state() != before:
            wrong.append(f"{case.name}: has changed something")
            before = scene.state()
    assert not wrong, "\n".join(wrong)
    scene.check_working()


def test_who_has_not_mapped_the_pool_for_writing_commits_nothing(scene: Scene) -> None:
    for writable in (None, False):
        if writable is not None:
            scene.other.ok("map_pool", host_pb2.MapPoolRequest(writable=writable))
        before = scene.state()
        answer = scene.other.call("commit", host_pb2.CommitRequest(step_id=scene.foreign_step))
        assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "POOL_NOT_SHARED"), writable
        assert scene.state() == before


def test_cases_are_as_many_as_they_should_be() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)) > 250
