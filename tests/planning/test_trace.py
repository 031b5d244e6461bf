"""Traces of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row

from kvservice.errors import InvalidArgumentError
from kvservice.planning import ConversationLoad, read_trace, synthetic_trace

MAX_TOKENS, MAX_LINES, MAX_LINE_BYTES = 1 << 24, 1_000_000, 16 << 20
LINE: dict[str, Any] = {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [3, 4, 5]}


def written(directory: Path, *lines: Any) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_line_is_a_request_with_its_full_blocks(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path, LINE)).requests
    assert request == (1.5, 1025, 7, (3, 4), 0)


def test_a_turn_that_extends_a_prompt_belongs_to_its_conversation(tmp_path: Path) -> None:
    prompts = [[0, 1, 2], [0, 9], [0, 1, 2, 3], [0, 9, 10, 11], [0], [0, 1, 7]]
    lines = [LINE | {"timestamp": n, "input_length": 512 * len(p), "hash_ids": p} for n, p in enumerate(prompts)]
    trace = read_trace(written(tmp_path, *lines))
    assert [request.conversation for request in trace.requests] == [0, 1, 0, 1, 2, 3]
    assert trace.conversation_tokens() == [4 * 512 + 7, 4 * 512 + 7, 512 + 7, 3 * 512 + 7]


def test_requests_are_sorted_by_arrival(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, LINE, "", LINE | {"timestamp": 0}))
    assert [request.arrival_s for request in trace.requests] == [0.0, 1.5]
    assert trace.duration_s == 1.5


NO_REQUESTS: list[Any] = [
    "{", "[]", "7", "{}", LINE | {"timestamp": -1}, LINE | {"timestamp": float("nan")}, LINE | {"input_length": -1},
    LINE | {"input_length": MAX_TOKENS + 1}, LINE | {"output_length": 1.5}, LINE | {"hash_ids": [3]},
    LINE | {"hash_ids": [3, 4, 5, 6]}, LINE | {"hash_ids": [3, 3, 4]}, LINE | {"hash_ids": ["a", "b"]},
    LINE | {"hash_ids": None}, LINE | {"input_length": True}, "[" * 100_000, LINE | {"timestamp": 10**400},
    LINE | {"timestamp": "7"}, LINE | {"hash_ids": [3, 4, 1 << 63]}, "[" + "1" * 5000 + "]",
]  # fmt: skip


def test_a_line_that_is_no_request_is_refused_by_number(tmp_path: Path) -> None:
    with each_row() as row:
        for line in NO_REQUESTS:
            with row(str(line)[:60]):
                with pytest.raises(InvalidArgumentError, match="line 2") as caught:
                    read_trace(written(tmp_path, LINE, line))
                assert caught.value.field == "trace"


def test_the_message_says_what_is_wrong(tmp_path: Path) -> None:
    lines: list[tuple[Any, str]] = [
        ("nonsense", "is not JSON"), ("[1]", "is not a JSON object"), ("{}", "has no timestamp and no input_length"),
        (LINE | {"timestamp": None}, "timestamp: must be"), (LINE | {"hash_ids": [1, 1, 1]}, "is there twice"),
        (LINE | {"input_length": 16}, "3 for 16 tokens in blocks of 512"),
    ]  # fmt: skip
    with each_row() as row:
        for line, said in lines:
            with row(said), pytest.raises(InvalidArgumentError, match=said):
                read_trace(written(tmp_path, line))


def test_the_size_of_a_file_is_limited(tmp_path: Path) -> None:
    lines = [LINE] * 4 + [json.dumps(LINE).ljust(MAX_LINE_BYTES - 1)]
    assert len(read_trace(written(tmp_path, *lines), max_blocks=10).requests) == 5
    with pytest.raises(InvalidArgumentError, match="9 full blocks"):
        read_trace(written(tmp_path, *lines), max_blocks=9)
    with pytest.raises(InvalidArgumentError, match="line 5: is longer than 16,777,216 bytes"):
        read_trace(written(tmp_path, *lines[:4], f"{lines[4]} "))
    assert len(read_trace(written(tmp_path, *[""] * (MAX_LINES - 1), LINE)).requests) == 1
    with pytest.raises(InvalidArgumentError, match="has more than 1,000,000 lines"):
        read_trace(written(tmp_path, *[""] * MAX_LINES, LINE))


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    for path in (written(tmp_path), tmp_path / "absent"):
        with pytest.raises(InvalidArgumentError, match="trace"):
            read_trace(path)


def test_synthetic_traces_have_turns_and_shared_prefixes() -> None:
    trace = synthetic_trace(ConversationLoad(50, 1.0), seed=3)
    assert trace == synthetic_trace(ConversationLoad(50, 1.0), seed=3)
    assert trace != synthetic_trace(ConversationLoad(50, 1.0), seed=4)
    assert [r.arrival_s for r in trace.requests] == sorted(r.arrival_s for r in trace.requests)
    last: dict[int, tuple[int, ...]] = {}
    for request in trace.requests:
        before = last.get(request.conversation, ())
        assert request.blocks[: len(before)] == before
        assert len(request.blocks) == request.input_tokens // trace.block_size
        last[request.conversation] = request.blocks
    assert len(last) == 50
    assert len({blocks[0] for blocks in last.values()}) < 30
