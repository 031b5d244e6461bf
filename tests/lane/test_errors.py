"""Invalid entries of a client get an error as the answer or end the lane, and change nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from lane_rig import OK, LaneRig, lane, mapped, memory_file
from lane_ring import (
    CAPACITY,
    COMPLETED,
    CONSUMED,
    DECODE,
    ENTRY,
    NO_REGION,
    RETURN_LSE,
    STATE,
    SUBMITTED,
)
from option_vectors import BLOCK_SIZE, INVALID

from kvservice import _ext
from kvservice.errors import ConnectionLostError, InvalidArgumentError, ResourceExhaustedError

# The fields of a packed entry, in order: number, step_id, layer, flags, num_heads, sliding_window, scale,
# logits_soft_cap; region, zero and offset of query, key, value, output, lse, alibi_slopes each; block_sparse.
GOOD = [0, 1, 0, DECODE | RETURN_LSE, 4, 0, 0.0, 0.0]
for offset in (0, 4096, 8192, 12288, 16384):
    GOOD += [0, 0, offset]
GOOD += [NO_REGION, 0, 0, 0, 0, 0, 0, 0]
NUMBER, STEP_ID, LAYER, FLAGS, NUM_HEADS, WINDOW, SCALE, SOFT_CAP = range(8)
QUERY, KEY, VALUE, OUTPUT, LSE, SLOPES = range(8, 26, 3)
SPARSE = 26
BLOCK_SPARSE = ("vert_stride", "local_blocks", "block_size", "head_sliding_step", "tp_rank")
REGION_BYTES = 1 << 20
OUTPUT_BYTES = 2 * 4 * 32 * 4

BAD: dict[str, tuple[dict[int, Any], str, str]] = {
    "number too small": ({NUMBER: 2**64 - 1}, "INVALID_ARGUMENT", "number"),
    "number too large": ({NUMBER: 1}, "INVALID_ARGUMENT", "number"),
    "unknown flag": ({FLAGS: 8}, "INVALID_ARGUMENT", "flags"),
    "flag of an older version": ({FLAGS: 4 | RETURN_LSE}, "INVALID_ARGUMENT", "flags"),
    "layer negative": ({LAYER: -1}, "INVALID_ARGUMENT", "layer"),
    "layer too large": ({LAYER: 2}, "INVALID_ARGUMENT", "layer"),
    "no heads": ({NUM_HEADS: 0}, "INVALID_ARGUMENT", "num_heads"),
    "heads negative": ({NUM_HEADS: -4}, "INVALID_ARGUMENT", "num_heads"),
    "heads no multiple": ({NUM_HEADS: 5}, "INVALID_ARGUMENT", "num_heads"),
    "too many heads": ({NUM_HEADS: 65536}, "INVALID_ARGUMENT", "num_heads"),
    "query left out": ({QUERY: NO_REGION}, "INVALID_ARGUMENT", "query"),
    "key left out": ({KEY: NO_REGION}, "INVALID_ARGUMENT", "key"),
    "value left out": ({VALUE: NO_REGION}, "INVALID_ARGUMENT", "value"),
    "output left out": ({OUTPUT: NO_REGION}, "INVALID_ARGUMENT", "output_place"),
    "lse left out": ({LSE: NO_REGION}, "INVALID_ARGUMENT", "lse_place"),
    "lse not asked for": ({FLAGS: 0}, "INVALID_ARGUMENT", "lse_place"),
    "query's region": ({QUERY: 1}, "UNKNOWN_REGION", "query"),
    "key's region": ({KEY: 2**31}, "UNKNOWN_REGION", "key"),
    "value's region": ({VALUE: 7}, "UNKNOWN_REGION", "value"),
    "output's region": ({OUTPUT: 7}, "UNKNOWN_REGION", "output_place"),
    "lse's region": ({LSE: 7}, "UNKNOWN_REGION", "lse_place"),
    "slopes' region": ({SLOPES: 7}, "UNKNOWN_REGION", "options.alibi_slopes"),
    "malformed place": ({QUERY + 1: 1}, "INVALID_ARGUMENT", "query"),
    "offset not aligned": ({KEY + 2: 4096 + 8}, "INVALID_ARGUMENT", "key"),
    "one row too far": ({OUTPUT + 2: REGION_BYTES - OUTPUT_BYTES + 16}, "INVALID_ARGUMENT", "output_place"),
    "at the end": ({VALUE + 2: REGION_BYTES}, "INVALID_ARGUMENT", "value"),
    "overflowing": ({QUERY + 2: 2**64 - 16}, "INVALID_ARGUMENT", "query"),
    "slopes outside": ({SLOPES: 0, SLOPES + 2: REGION_BYTES}, "INVALID_ARGUMENT", "options.alibi_slopes"),
    "output over query": ({OUTPUT + 2: OUTPUT_BYTES - 16}, "INVALID_ARGUMENT", "output_place"),
    "output over key": ({OUTPUT + 2: 4096}, "INVALID_ARGUMENT", "output_place"),
    "output over value": ({OUTPUT + 2: 8192 - OUTPUT_BYTES + 16}, "INVALID_ARGUMENT", "output_place"),
    "output over lse": ({OUTPUT + 2: 16384}, "INVALID_ARGUMENT", "output_place"),
    "output over slopes": ({SLOPES: 0, SLOPES + 2: 12288}, "INVALID_ARGUMENT", "output_place"),
    "lse over value": ({LSE + 2: 8192}, "INVALID_ARGUMENT", "lse_place"),
    "block-sparse": ({SPARSE: 2, SPARSE + 1: 1, SPARSE + 2: 16}, "INVALID_ARGUMENT", "options.block_sparse"),
    "step unknown": ({STEP_ID: 2}, "UNKNOWN_STEP", "step_id"),
    "step below all": ({STEP_ID: 0}, "STALE_STEP", "step_id"),
    "several tokens": ({STEP_ID: 1, FLAGS: DECODE | RETURN_LSE}, "INVALID_ARGUMENT", "step_id"),
}


def send(rig: LaneRig, entry: bytes) -> tuple[str, str, str]:
    """Write an entry as the next one in the ring and return its answer."""
    number = int(rig.word(SUBMITTED)[0])
    rig.write_entry(number, entry)
    rig.word(SUBMITTED)[0] = number + 1
    wait_until(lambda: rig.word(COMPLETED)[0] == number + 1)
    answered, ok, *texts = rig.completion(number)
    assert answered == number
    assert ok == (texts == ["", "", ""])
    rig.word(CONSUMED)[0] = number + 1
    return texts[0], texts[1], texts[2]


def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        pass


def test_a_bad_entry_is_answered_with_an_error() -> None:
    # It spins long enough, because raw entries do not wake a sleeping server.
    with each_row() as row, lane(spin_us=5000.0) as shared:
        for name, (changes, reason, field) in BAD.items():
            with row(name), lane(spin_us=5000.0, shared_with=shared) as rig:
                step = rig.publish(1, (2, 0) if name == "several tokens" else (1, 1), (5, 9))
                pool, region = rig.pool.copy(), rig.region.copy()
                values = list(GOOD)
                for index, value in changes.items():
                    values[index] = value
                assert send(rig, ENTRY.pack(*values))[:2] == (reason, field)
                assert rig.pool.tobytes() == pool.tobytes()
                assert rig.region.tobytes() == region.tobytes()
                assert step.written == bytearray(2)
                assert rig.take_finished() == []
                assert rig.server.stats()[:2] == (1, 1)
                good = [1, *GOOD[1:]]
                good[FLAGS] = RETURN_LSE
                assert send(rig, ENTRY.pack(*good)) == OK


def test_reserved_room_must_be_empty() -> None:
    with lane() as rig:
        rig.publish(1, (1,), (5,))
        entry = bytearray(ENTRY.pack(*GOOD))
        entry[-1] = 1
        assert send(rig, bytes(entry))[:2] == ("INVALID_ARGUMENT", "reserved")


def test_an_option_is_refused_as_everywhere() -> None:
    with each_row() as row, lane(spin_us=5000.0, block_size=BLOCK_SIZE) as rig:
        rig.publish(1, (1, 1), (5, 9))
        for vector in INVALID:
            with row(vector):
                values = list(GOOD)
                values[NUMBER] = int(rig.word(SUBMITTED)[0])
                for name, value in vector.options.items():
                    if name == "alibi_slopes":
                        rig.region[32768 : 32768 + 16].view(np.float32)[:] = value
                        values[SLOPES], values[SLOPES + 2] = 0, 32768
                    elif name == "block_sparse":
                        values[SPARSE : SPARSE + 5] = [value.get(part, 0) for part in BLOCK_SPARSE]
                    else:
                        values[{"sliding_window": WINDOW, "scale": SCALE, "logits_soft_cap": SOFT_CAP}[name]] = value
                assert send(rig, ENTRY.pack(*values)) == ("INVALID_ARGUMENT", f"options.{vector.field}", vector.text)


def test_a_layer_is_written_once_and_a_step_finishes_once() -> None:
    with lane() as rig:
        step = rig.publish(5, (1, 1), (5, 9))
        call = rig.tensors(step)
        assert rig.call(5, 1, call) == OK
        assert step.written == bytearray([0, 1])
        assert rig.take_finished() == []
        assert rig.call(5, 1, call)[:2] == ("LAYER_WRITTEN", "layer")
        assert rig.call(5, 0, call) == OK
        assert rig.call(5, 0, call)[:2] == ("LAYER_WRITTEN", "layer")
        assert rig.take_finished() == [5]
        assert rig.take_finished() == []


def test_layers_that_were_written_elsewhere_count() -> None:
    with lane() as rig:
        step = rig.publish(1, (1,), (5,))
        step.written[0] = 1
        call = rig.tensors(step)
        assert rig.call(1, 0, call)[0] == "LAYER_WRITTEN"
        assert rig.take_finished() == []
        assert rig.call(1, 1, call) == OK
        assert rig.take_finished() == [1]


def test_steps_rise_and_go() -> None:
    with lane() as rig:
        step = rig.publish(3, (1,), (5,))
        call = rig.tensors(step)
        assert rig.call(4, 0, call)[:2] == ("UNKNOWN_STEP", "step_id")
        rig.publish(4, (1,), (5,), first_block=8)
        rig.session.retire(3)
        rig.session.retire(3)
        rig.session.retire(99)
        assert rig.call(3, 0, call)[:2] == ("STALE_STEP", "step_id")
        assert rig.call(4, 0, call) == OK
        for step_id in (3, 4):
            step.step_id = step_id
            with pytest.raises(InvalidArgumentError) as caught:
                rig.republish(step)
            assert caught.value.field == "step_id"


def test_arrays_that_do_not_fit_are_refused() -> None:
    with lane() as rig:
        step = rig.publish(1, (1, 1), (5, 9))
        slots = step.slot_mapping
        good = [bytearray(2), slots, step.query_lens, step.context_lens, step.block_tables]
        bad: list[tuple[int, Any, str]] = [
            (0, bytearray(3), "written"),
            (0, bytes(2), "written"),
            (1, slots.astype(np.int32), "slot_mapping"),
            (1, np.repeat(slots, 2)[::2], "slot_mapping"),
            (1, list(slots), "slot_mapping"),
            (2, step.query_lens[:, None], "query_lens"),
            (3, step.context_lens[:1], "context_lens"),
            (4, np.asfortranarray(np.zeros((2, 3), np.int32)), "block_tables"),
            (4, step.block_tables[:1], "block_tables"),
        ]
        for index, value, field in bad:
            arguments = list(good)
            arguments[index] = value
            with pytest.raises(InvalidArgumentError) as caught:
                rig.session.publish(2, *arguments)
            assert caught.value.field == field


def test_a_step_that_does_not_fit_the_pool_is_refused_and_stays_unwritten() -> None:
    with lane() as rig:
        step = rig.publish(1, (1,), (5,))
        step.block_tables[0, 1] = 64
        call = rig.tensors(step)
        assert rig.call(1, 0, call)[:2] == ("INVALID_ARGUMENT", "block_tables")
        assert step.written == bytearray(2)
        step.block_tables[0, 1] = 1
        assert rig.call(1, 0, call) == OK


def test_draining_lets_begun_steps_end() -> None:
    with lane() as rig:
        begun = rig.publish(1, (1,), (5,))
        rig.publish(2, (1,), (5,), first_block=8)
        call = rig.tensors(begun)
        assert rig.call(1, 0, call) == OK
        rig.session.set_draining()
        assert rig.call(2, 0, call)[:2] == ("DRAINING", "")
        assert rig.call(1, 1, call) == OK


def test_regions_go_and_their_numbers_do_not_come_back() -> None:
    with lane() as rig:
        step = rig.publish(1, (1,), (5,))
        call = rig.tensors(step)
        rig.session.remove_region(rig.region_number)
        rig.session.remove_region(rig.region_number)
        assert rig.call(1, 0, call)[:2] == ("UNKNOWN_REGION", "query")
        rig.region_number = rig.session.add_region(rig.region.ctypes.data, len(rig.region))
        assert rig.region_number == 1
        assert rig.call(1, 0, call) == OK
        for address, num_bytes, field in ((8, 16, "address"), (0, 16, "address"), (16, 0, "num_bytes")):
            with pytest.raises(InvalidArgumentError) as caught:
                rig.session.add_region(address, num_bytes)
            assert caught.value.field == field


def test_an_index_that_makes_no_sense_ends_the_lane() -> None:
    with each_row() as row:
        for submitted in (CAPACITY + 1, 2**63, 2**64 - 1):
            with row(submitted), lane(spin_us=0.0) as rig, lane(shared_with=rig) as other:
                rig.word(SUBMITTED)[0] = submitted
                wait_until(lambda: rig.server.closed)
                assert rig.word(STATE)[0] == 3
                with pytest.raises(ConnectionLostError, match="index"):
                    rig.client.submit(1, 0, True, 4, (0, 0), (0, 0), (0, 0), (0, 0), None)
                assert other.call(1, 0, other.tensors(other.publish(1, (1,), (5,)))) == OK


def test_nobody_reads_what_was_not_written() -> None:
    with each_row() as row:
        for consumed in (CAPACITY + 1, 2**64 - 1):
            with row(consumed), lane() as rig:
                for _ in range(CAPACITY):
                    rig.client.submit(1, 0, True, 4, (0, 0), (0, 0), (0, 0), (0, 0), None)
                wait_until(lambda: rig.word(COMPLETED)[0] == CAPACITY)
                rig.word(CONSUMED)[0] = consumed
                rig.word(SUBMITTED)[0] = CAPACITY + 1
                wait_until(lambda: rig.server.closed)
                assert rig.word(STATE)[0] == 3


def test_who_does_not_read_is_served_no_more_until_he_does() -> None:
    with lane(spin_us=0.0) as rig, lane(shared_with=rig) as other:
        entry = struct.Struct("<Q248x")
        for number in range(CAPACITY):
            rig.write_entry(number, entry.pack(number))
        rig.word(SUBMITTED)[0] = CAPACITY
        wait_until(lambda: rig.word(COMPLETED)[0] == CAPACITY)
        for number in range(CAPACITY, 2 * CAPACITY):
            rig.write_entry(number, entry.pack(number))
        rig.word(SUBMITTED)[0] = 2 * CAPACITY
        call = other.tensors(other.publish(1, (1,), (5,)))
        assert other.call(1, 0, call) == OK
        assert other.call(1, 1, call) == OK
        assert rig.word(COMPLETED)[0] == CAPACITY
        rig.word(CONSUMED)[0] = 3
        wait_until(lambda: rig.word(COMPLETED)[0] == CAPACITY + 3)
        assert rig.server.stats()[0] == CAPACITY + 3


def test_a_client_reports_more_completions_than_calls() -> None:
    with lane() as rig:
        call = rig.tensors(rig.publish(1, (1,), (5,)))
        assert rig.call(1, 0, call) == OK
        number, _, _ = rig.submit(1, 1, call)
        wait_until(lambda: rig.word(COMPLETED)[0] == 2)
        rig.word(COMPLETED)[0] = 3
        with pytest.raises(ConnectionLostError, match="make no sense"):
            rig.client.wait(number, 1.0)
        rig.word(COMPLETED)[0] = 2
        rig.memory[20480 + 256] = 7  # the number of the completion
        with pytest.raises(ConnectionLostError, match="makes no sense"):
            rig.client.wait(number, 1.0)


def test_waiting_is_for_calls_that_were_sent_and_not_read() -> None:
    with lane() as rig:
        call = rig.tensors(rig.publish(1, (1,), (5,)))
        first, _, _ = rig.submit(1, 0, call)
        second, _, _ = rig.submit(1, 1, call)
        assert rig.wait(second) == OK
        for number in (first, second, second + 1, -1):
            with pytest.raises(InvalidArgumentError) as caught:
                rig.client.wait(number, 1.0)
            assert caught.value.field == "number"


def test_a_ring_that_is_full_takes_no_more() -> None:
    with lane() as rig:
        places: list[Any] = [(0, 4096 * index) for index in range(5)]
        numbers = [rig.client.submit(9, 0, True, 4, *places) for _ in range(CAPACITY)]
        with pytest.raises(ResourceExhaustedError):
            rig.client.submit(9, 0, True, 4, *places)
        assert rig.wait(numbers[0])[0] == "UNKNOWN_STEP"
        assert rig.wait(rig.client.submit(9, 0, True, 4, *places))[0] == "UNKNOWN_STEP"


def test_what_does_not_fit_an_entry_is_refused() -> None:
    good: dict[str, Any] = {"step_id": 1, "layer": 0, "decode": True, "num_heads": 4}
    good |= dict.fromkeys(("query", "key", "value", "output", "lse"), (0, 0))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"step_id": 2**63}, "step_id"),
        ({"layer": 2**31}, "layer"),
        ({"num_heads": -(2**31) - 1}, "num_heads"),
        ({"query": (2**32, 0)}, "query"),
        ({"key": (0, -1)}, "key"),
        ({"value": [0, 0]}, "value"),
        ({"output": (0,)}, "output_place"),
        ({"lse": "no"}, "lse_place"),
        ({"scale": 1e39}, "options.scale"),
        ({"sliding_window": 0.5}, "options.sliding_window"),
        ({"logits_soft_cap": "x"}, "options.logits_soft_cap"),
        ({"alibi_slopes": (-1, 0)}, "options.alibi_slopes"),
        ({"block_sparse": (1, 2, 3, 4)}, "options.block_sparse"),
    ]
    with each_row() as row, lane() as rig:
        for changes, field in wrong:
            with row(changes):
                with pytest.raises(InvalidArgumentError) as caught:
                    rig.client.submit(**{**good, **changes})
                assert caught.value.field == field
                assert rig.word(SUBMITTED)[0] == 0


def test_memory_that_is_no_lane_is_refused() -> None:
    with lane() as rig:
        empty = mapped(memory_file(_ext.LANE_BYTES), _ext.LANE_BYTES)
        for memory in (empty, empty[:-4096], rig.memory.tobytes(), "text"):
            with pytest.raises(InvalidArgumentError) as caught:
                _ext.LaneClient(memory, 20.0)
            assert caught.value.field == "memory"
        for version in (0, 2):
            rig.memory[8:12].view(np.uint32)[0] = version
            with pytest.raises(InvalidArgumentError, match="version"):
                _ext.LaneClient(rig.memory, 20.0)
        for memory in (empty[:-4096], empty[8:], bytes(_ext.LANE_BYTES)):
            with pytest.raises(InvalidArgumentError) as caught:
                _ext.LaneServer(memory, rig.session, rig.executor, 20.0, print)
            assert caught.value.field == "memory"
        for spin_us in (-1.0, 1e6):
            with pytest.raises(InvalidArgumentError) as caught:
                _ext.LaneServer(empty, rig.session, rig.executor, spin_us, print)
            assert caught.value.field == "spin_us"
        with pytest.raises(InvalidArgumentError) as caught:
            _ext.LaneServer(empty, _ext.LaneSession(3, rig.finished, 0), rig.executor, 20.0, print)
        assert caught.value.field == "session"
