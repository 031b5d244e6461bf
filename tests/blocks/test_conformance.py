"""Replay of traces of vLLM's v0 block manager. Its operations succeed here with the same counts and the same sharing.

Its checks are conservative, so ours may say yes where it said no, but not the reverse.

The recorded tables are v0's own lists, which its later appends changed in place, even past the end of the trace. So the
full blocks of a table, which never change, are compared immediately, and its length is compared where a swap or a free
ended the list. The copies and the number of free blocks after each step show that the last blocks are shared equally.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from blocks_calls import can_allocate
from each_row import each_row

from kvservice.blocks import AllocationRequest, AllocStatus, BlockManager, BlocksConfig

TRACES = Path(__file__).parent / "data" / "v0_traces.jsonl.gz"


def load_traces() -> list[dict[str, Any]]:
    with gzip.open(TRACES, "rt") as lines:
        return [json.loads(line) for line in lines]


class Replay:
    def __init__(self, config: dict[str, Any]) -> None:
        self.manager = BlockManager(
            BlocksConfig(
                num_blocks=config["num_gpu_blocks"],
                block_size=config["block_size"],
                num_swap_blocks=config["num_cpu_blocks"],
                watermark=config["watermark"],
                enable_prefix_caching=config["enable_prefix_caching"],
            )
        )
        self.space = self.manager.open_namespace()
        self.recorded: dict[int, list[int]] = {}
        self.yes_where_v0_said_no = 0

    def perform(self, op: dict[str, Any]) -> None:
        getattr(self, op["op"])(op)
        self.manager.check_integrity()
        if "free_gpu" in op:
            stats = self.manager.stats()
            assert stats.free_blocks == op["free_gpu"]
            assert stats.num_swap_blocks - stats.used_swap_blocks == op["free_cpu"]

    def judge(self, ours: bool, theirs: bool) -> bool:
        """Return v0's answer, after a check that ours is not stricter."""
        assert ours or not theirs
        self.yes_where_v0_said_no += ours and not theirs
        return theirs

    def allocate(self, op: dict[str, Any]) -> None:
        request = [AllocationRequest(op["seq"], op["tokens"], lookahead=op["lookahead"])]
        status = can_allocate(self.manager, self.space, request)
        assert status.name == op["status"]
        if self.judge(status is AllocStatus.OK, op["status"] == "OK"):
            (made,) = self.manager.allocate(self.space, request)
            assert (made.num_blocks, made.num_cached_tokens) == (op["num_blocks"], op["cached_tokens"])
            step = self.manager.open_step(self.space, [op["seq"]])
            self.manager.mark_all_layers(self.space, step.step_id)

    def append(self, op: dict[str, Any]) -> None:
        seqs, lookahead = op["seqs"], op["lookahead"]
        if self.judge(self.manager.can_append(self.space, seqs, lookahead=lookahead), op["can_append"]):
            before = self.manager.stats().cow_copies
            step = self.manager.append(self.space, seqs, np.ravel(op["tokens"]), lookahead=lookahead)
            self.manager.mark_all_layers(self.space, step.step_id)
            assert self.manager.stats().cow_copies - before == op["cow"]
            assert [info.num_blocks for info in self.manager.describe(self.space, seqs)] == op["num_blocks"]

    def fork(self, op: dict[str, Any]) -> None:
        self.manager.fork(self.space, [op["parent"]], [op["child"]])

    def free(self, op: dict[str, Any]) -> None:
        self.end_lists([op["seq"]])
        self.manager.free(self.space, [op["seq"]])

    def swap_out(self, op: dict[str, Any]) -> None:
        if self.judge(self.manager.can_swap_out(self.space, op["seqs"]), op["can"]):
            self.end_lists(op["seqs"])
            assert len(self.manager.swap_out(self.space, op["seqs"])) == op["moved"]

    def swap_in(self, op: dict[str, Any]) -> None:
        status = self.manager.can_swap_in(self.space, op["seqs"], op["lookahead"])
        if self.judge(status is AllocStatus.OK, op["status"] == "OK"):
            self.end_lists(op["seqs"])
            assert len(self.manager.swap_in(self.space, op["seqs"], op["lookahead"])) == op["moved"]

    def table(self, seq: int) -> list[tuple[bool, int]]:
        """Return our blocks of a sequence as (is in the swap tier, block id)."""
        (info,) = self.manager.describe(self.space, [seq], include_blocks=True)
        assert info.block_ids is not None
        return [(info.swapped, block) for block in info.block_ids.tolist()]

    def tables(self, op: dict[str, Any]) -> None:
        self.recorded = {int(seq): table for seq, table in op["tables"].items()}
        assert set(self.space.sequence_ids()) == self.recorded.keys()
        block_size = self.manager.config.block_size
        full = {info.sequence_id: info.length // block_size for info in self.manager.describe(self.space)}
        same_sharing((self.table(seq)[: full[seq]], table[: full[seq]]) for seq, table in self.recorded.items())

    def end_lists(self, seqs: list[int]) -> None:
        """Compare the tables of sequences whose v0 lists no longer change, so that the recorded lists are current."""
        for seq in seqs:
            table = self.recorded.pop(seq, None)
            assert table is None or len(table) == len(self.table(seq))


def same_sharing(tables: Iterable[tuple[list[tuple[bool, int]], list[int]]]) -> None:
    """The block ids of the managers differ. A one-to-one renaming between them shows that the sharing is the same."""
    pairs = set()
    for ours, theirs in tables:
        pairs |= set(zip(ours, theirs, strict=True))
    assert len({block for block, _ in pairs}) == len(pairs) == len({block for _, block in pairs})


def test_replay() -> None:
    """Replay.perform fails if an answer or a block table differs from the trace. Our answers are exact where v0's were
    conservative: over all traces, several appends that v0 refused have enough blocks here."""
    yes_where_v0_said_no = 0
    with each_row() as row:
        for trace in load_traces():
            config = trace["config"]
            with row((config["block_size"], config["num_gpu_blocks"])):
                replay = Replay(config)
                for op in trace["ops"]:
                    replay.perform(op)
                yes_where_v0_said_no += replay.yes_where_v0_said_no
    assert yes_where_v0_said_no > 0
