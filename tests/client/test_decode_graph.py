"""The decode step at fixed addresses, with a pool in host memory, where a replay calls the step: tables that move on,
commits beside the steps, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from decode_rig import MAX_TOKENS, GraphToy, Toy, check_random_runs, check_tables, state_of  # noqa: E402  torch may be missing
from each_row import each_row  # noqa: E402
from kept_daemon import next_process  # noqa: E402
from small_daemons import OpenDaemon  # noqa: E402
from small_pool import SMALL_POOL  # noqa: E402

from kvservice.client import KVClient, Sequence, Session  # noqa: E402
from kvservice.client.decode_graph import DecodeGraph  # noqa: E402
from kvservice.client.threads import finish  # noqa: E402
from kvservice.errors import (  # noqa: E402
    CallTimeoutError,
    FailedPreconditionError,
    InvalidArgumentError,
    LengthMismatchError,
    OutOfBlocksError,
    PoolNotSharedError,
    StaleStepError,
)
from kvservice.launch import Daemon  # noqa: E402
from kvservice.v1 import host_pb2  # noqa: E402

PROMPTS = ([1, 2, 3, 4, 5], [6], [7, 8, 9, 10])
BOUND = 1e-5


@pytest.fixture
def kv(open_daemon: OpenDaemon) -> Iterator[Session]:
    with KVClient(open_daemon("float32", "write").address) as client:
        with client.session() as session:
            yield session
        with client.session() as session:
            session.reset_prefix_cache()


@pytest.fixture(scope="module")
def large() -> Iterator[KVClient]:
    with Daemon(**SMALL_POOL | {"num_blocks": 512}) as daemon, KVClient(daemon.address) as client:
        yield client


@pytest.fixture
def toy(kv: Session) -> Toy:
    return Toy(kv, "cpu")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_random_runs_give_what_appends_give(large: KVClient, seed: int) -> None:
    """The rig compares outputs, tokens and K/V."""
    with large.session() as kv, large.session() as other:
        check_random_runs(kv, other, "cpu", seed, BOUND)


def test_the_tables_move_on() -> None:
    """The rig compares positions, lengths and slots."""
    for seed in range(4):
        check_tables(torch.device("cpu"), seed)


def test_unknown_tokens_are_forgotten(kv: Session, toy: Toy) -> None:
    graph, sequences = GraphToy(toy, 3), toy.compute(*PROMPTS)
    before = state_of(kv, sequences)
    graph.graph.begin(sequences, 2)
    graph.replay([1, 2, 3])
    graph.replay([4, 5, 6])
    graph.graph.end()
    assert state_of(kv, sequences) == before
    graph.graph.begin(sequences, 2)
    graph.replay([1, 2, 3])
    graph.replay([4, 5, 6])
    graph.graph.written([1, 2, 3])
    graph.graph.begin(sequences[:1], 2)  # ends the steps before
    assert [sequence.length for sequence in sequences] == [6, 2, 5]
    graph.graph.end()
    graph.graph.end()


def test_nobody_waits_for_a_commit(kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on while a commit is on its way, as far as they have slots."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    go_on, commit = threading.Event(), kv.commit_ahead
    monkeypatch.setattr(kv, "commit_ahead", lambda *args, **kwargs: (go_on.wait(20), commit(*args, **kwargs))[1])
    graph.graph.begin(sequences, 3)
    for number in range(6):
        graph.replay([number])
        graph.graph.written([number])
    assert sequences[0].length == 3
    go_on.set()
    for number in range(6, 20):
        graph.replay([number])
        graph.graph.written([number])
    graph.graph.check()
    graph.graph.end()
    (found,) = kv.describe(sequences, token_ids=True)
    assert found.token_ids == (1, 2, 3, *range(20))


def test_nobody_waits_for_the_answer_to_a_commit(kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on after the daemon has ended the last step ahead, and before its answer with the next one is here."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    committed, go_on, commit = threading.Event(), threading.Event(), kv.commit_ahead

    def late(*args: Any, **kwargs: Any) -> Any:
        step = commit(*args, **kwargs)
        committed.set()
        go_on.wait(20)
        return step

    monkeypatch.setattr(kv, "commit_ahead", late)
    graph.graph.begin(sequences, 3)
    for number in range(3):
        graph.replay([number])
        graph.graph.written([number])
    graph.replay([3])
    assert committed.wait(20)
    graph.graph.written([3])
    for number in range(4, 6):
        graph.replay([number])
        graph.graph.written([number])
    assert not go_on.is_set(), "the answer is not here"
    go_on.set()
    for number in range(6, 20):
        graph.replay([number])
        graph.graph.written([number])
    graph.graph.end()
    (found,) = kv.describe(sequences, token_ids=True)
    assert found.token_ids == (1, 2, 3, *range(20))


def test_a_capture_writes_nowhere(kv: Session, toy: Toy) -> None:
    """Also after other sequences were in the tables, whose blocks may be others' since."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    graph.graph.begin(sequences, 2)
    graph.replay([4])
    graph.graph.written([4])
    graph.graph.end()
    toy.decode(sequences, [5])
    before = state_of(kv, sequences)

    def step() -> None:
        for layer in range(toy.num_layers):
            graph.graph.attend(layer, *toy.tensors(graph.tokens, graph.graph.positions, layer))

    graph.graph.capture(step)
    assert state_of(kv, sequences) == before


def test_too_many_steps_with_unknown_tokens(kv: Session, toy: Toy) -> None:
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    graph.graph.begin(sequences, 2)
    for number in range(4):
        graph.replay([number])
    with pytest.raises(FailedPreconditionError, match=r"written\(\)"):
        graph.replay([4])
    for number in range(4):
        graph.graph.written([number])
    with pytest.raises(FailedPreconditionError, match="already"):
        graph.graph.written([4])
    graph.replay([4])
    graph.graph.written([4])
    graph.graph.end()
    assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, 0, 1, 2, 3, 4)


def test_sequences_grow_to_the_last_token_of_the_graph(toy: Toy) -> None:
    graph, sequences = GraphToy(toy, 2, max_tokens=11), toy.compute([1, 2, 3], [4])
    graph.graph.begin(sequences, 3)
    for number in range(8):
        graph.replay([number, number])
        graph.graph.written([number, number])
    with pytest.raises(InvalidArgumentError, match="11 tokens"):
        graph.replay([8, 8])
    graph.graph.end()
    assert [sequence.length for sequence in sequences] == [11, 9]
    with pytest.raises(InvalidArgumentError, match="11 tokens"):
        graph.graph.begin(sequences, 3)
    graph.graph.begin(sequences[1:], 3)
    graph.graph.end()


def end_by_append(kv: Session, sequence: Any) -> None:
    kv.append([sequence], [1])


def end_by_free(kv: Session, sequence: Any) -> None:
    kv.free([sequence])


def end_the_mapping(kv: Session, _: Any) -> None:
    finish(kv._core.context.connection.send("unmap_pool", host_pb2.UnmapPoolRequest()))


def test_a_step_that_has_ended_is_refused(kv: Session, toy: Toy) -> None:
    """Every method of the graph raises StaleStepError."""
    with each_row() as row:
        for end in (end_by_append, end_by_free, end_the_mapping):
            with row(end.__name__):
                check_end(kv, toy, end)


def check_end(kv: Session, toy: Toy, end: Any) -> None:
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    graph.graph.begin(sequences, 2)
    graph.replay([1])
    end(kv, sequences[0])
    for refused in (
        lambda: graph.replay([2]),
        lambda: graph.graph.written([1]),
        graph.graph.check,
        graph.graph.end,
    ):
        with pytest.raises(StaleStepError):
            refused()
    graph.graph.end()


def test_a_step_that_fails_is_not_committed(kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of its layers were written, so that nobody may find its K/V."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    attend = graph.graph.attend
    graph.graph.begin(sequences, 4)
    graph.replay([4])
    with monkeypatch.context() as patch:
        patch.setattr(graph.graph, "attend", lambda layer, *rest: attend(layer, *rest) if layer == 0 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            graph.replay([5])
    with pytest.raises(FailedPreconditionError, match="failed"):
        graph.replay([5])
    graph.graph.written([4])
    with pytest.raises(FailedPreconditionError, match="already"):
        graph.graph.written([5])
    graph.graph.end()
    assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, 4)
    graph.graph.begin(sequences, 4)
    graph.replay([5])
    graph.graph.written([5])
    graph.graph.end()
    expected = toy.compute([1, 2, 3, 4])
    toy.decode(expected, [5])
    assert state_of(kv, sequences) == state_of(kv, expected)


def test_a_step_that_ends_beside_a_commit_is_refused(kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks may be others' before the answer to the commit is here."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    go_on, commit = threading.Event(), kv.commit_ahead
    monkeypatch.setattr(kv, "commit_ahead", lambda *args, **kwargs: (go_on.wait(20), commit(*args, **kwargs))[1])
    graph.graph.begin(sequences, 2)
    for number in range(2):
        graph.replay([number])
        graph.graph.written([number])
    graph.replay([2])
    kv.append(sequences, [9])
    threading.Timer(0.1, go_on.set).start()
    with pytest.raises(StaleStepError):
        graph.replay([3])


def test_tokens_that_are_known_after_the_last_slot_was_taken(toy: Toy) -> None:
    """They are committed at once: the next step has to wait for it."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    graph.graph.begin(sequences, 3)
    for number in range(6):
        graph.replay([number])
    for number in range(3):
        graph.graph.written([number])
    graph.graph.check()
    assert sequences[0].length == 6
    graph.graph.end()


def lose_answers(kv: Session, monkeypatch: pytest.MonkeyPatch, lost: set[int], *, executed: bool) -> None:
    """Make these calls of commit_ahead reach their time limits, before the daemon gets them or after it answers."""
    commit, numbers = kv.commit_ahead, itertools.count()

    def late(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) not in lost:
            return commit(*args, **kwargs)
        if executed:
            lengths = [sequence.length for sequence in args[0].sequences]
            commit(*args, **kwargs)
            for sequence, length in zip(args[0].sequences, lengths, strict=True):
                sequence.length = length
        raise CallTimeoutError("the call")

    monkeypatch.setattr(kv, "commit_ahead", late)


def test_commits_without_an_answer_are_made_again(kv: Session, toy: Toy) -> None:
    """They are executed once. The run goes on."""
    with each_row() as row:
        for num_steps in (2, 3, 5):
            for executed in (False, True):
                with row(f"{num_steps} steps, executed: {executed}"), pytest.MonkeyPatch.context() as patch:
                    check_lost_answers(kv, toy, patch, num_steps, executed=executed)


def check_lost_answers(
    kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch, num_steps: int, *, executed: bool
) -> None:
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    lose_answers(kv, monkeypatch, {0, 2, 3, 5}, executed=executed)
    graph.graph.begin(sequences, num_steps)
    num_failures = 0
    for number in range(25):
        while True:
            try:
                graph.replay([number])
                break
            except CallTimeoutError:
                num_failures += 1
        graph.graph.written([number])
    while graph.graph.steps is not None:
        with contextlib.suppress(CallTimeoutError):
            graph.graph.end()
    assert num_failures > 0
    (found,) = kv.describe(sequences, token_ids=True)
    assert found.token_ids == (1, 2, 3, *range(25))
    assert sequences[0].length == found.length == found.num_computed_tokens == 28
    expected = toy.compute([1, 2, 3, *range(25)])
    assert state_of(kv, sequences) == state_of(kv, expected)
    kv.free([*sequences, *expected])


def test_a_commit_whose_wait_is_interrupted_is_not_made_again(
    kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread is interrupted as by Ctrl-C, while the commit is on its way in another one."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    waits, interrupted, go_on, commit = threading.Event(), threading.Event(), threading.Event(), kv.commit_ahead
    main = threading.main_thread().ident
    assert main == threading.get_ident(), "signals reach the main thread"

    def slowly(*args: Any, **kwargs: Any) -> Any:
        waits.wait()
        # A signal just before the main thread begins to wait does not end its wait. The next one does.
        while not interrupted.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)
        go_on.wait()
        return commit(*args, **kwargs)

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def check() -> None:
        waits.set()
        graph.graph.check()

    monkeypatch.setattr(kv, "commit_ahead", slowly)
    former = signal.signal(signal.SIGINT, interrupt)
    try:
        graph.graph.begin(sequences, 2)
        for number in range(4):
            graph.replay([number])
        for number in range(2):
            graph.graph.written([number])
        with pytest.raises(KeyboardInterrupt):
            check()
    finally:
        signal.signal(signal.SIGINT, former)
    go_on.set()
    graph.graph.check()
    assert sequences[0].length == 5
    graph.graph.end()
    assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, 0, 1)
    assert sequences[0].length == 5


def test_an_end_without_an_answer_is_made_again(kv: Session, toy: Toy) -> None:
    """It is executed once, and nothing else is possible before."""
    for executed in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            check_lost_end(kv, toy, patch, executed=executed)


def check_lost_end(kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch, *, executed: bool) -> None:
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    lose_answers(kv, monkeypatch, {0, 1}, executed=executed)
    graph.graph.begin(sequences, 4)
    graph.replay([4])
    graph.graph.written([4])
    for _ in range(2):
        with pytest.raises(CallTimeoutError):
            graph.graph.end()
        for refused in (lambda: graph.replay([5]), lambda: graph.graph.written([5])):
            with pytest.raises(FailedPreconditionError, match="end"):
                refused()
    graph.graph.end()
    assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, 4)
    assert sequences[0].length == 4
    graph.graph.begin(sequences, 4)
    graph.graph.end()


def test_a_length_that_the_daemon_does_not_know_is_refused(kv: Session, toy: Toy) -> None:
    """The graph would write into tokens that others may share."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3, 4, 5, 6])
    before = state_of(kv, sequences)
    for length in (3, 7):
        with pytest.raises(LengthMismatchError) as raised:
            graph.graph.begin([Sequence(sequences[0].sequence_id, length)], 4)
        assert raised.value.field == "expected_lengths[0]"
    assert state_of(kv, sequences) == before
    graph.graph.begin(sequences, 4)
    graph.graph.end()


def test_the_end_of_a_run_is_one_call(kv: Session, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has a multiple of the tokens of a commit."""
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    num_steps, commit = [], kv.commit_ahead

    def counted(*args: Any, **kwargs: Any) -> Any:
        num_steps.append(kwargs.get("num_steps", 0))
        return commit(*args, **kwargs)

    monkeypatch.setattr(kv, "commit_ahead", counted)
    graph.graph.begin(sequences, 2)
    for number in range(4):
        graph.replay([number])
        graph.graph.written([number])
    graph.graph.end()
    assert num_steps == [4, 0]
    assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, 0, 1, 2, 3)


def test_wrong_tokens_are_refused_at_once(kv: Session, toy: Toy) -> None:
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    graph.graph.begin(sequences, 2)
    graph.replay([4])
    wrong: Any
    with each_row() as row:
        for wrong in ([1.5], [-1], [2**31], ["a"], [None], [2**70], [[1]], None, 5):
            with row(wrong):
                with pytest.raises(InvalidArgumentError) as raised:
                    graph.graph.written(wrong)
                assert raised.value.field == "token_ids"
    graph.graph.written([4])
    graph.graph.end()
    assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, 4)


WRONG_TENSORS: dict[str, Any] = {
    "query": lambda query, key, value: {"query": query[:1]},
    "key": lambda query, key, value: {"key": query},
    "value": lambda query, key, value: {"value": value.half()},
    "out": lambda query, key, value: {"out": torch.empty(3, *query.shape)},
}


def test_wrong_tensors_are_named(toy: Toy) -> None:
    """InvalidArgumentError has the name of the argument."""
    for field in WRONG_TENSORS:
        check_wrong_tensor(toy, field)


def check_wrong_tensor(toy: Toy, field: str) -> None:
    graph = DecodeGraph(toy.kv, 2, MAX_TOKENS)

    def step() -> None:
        query, key, value = toy.tensors(torch.zeros(2, dtype=torch.int64), graph.positions, 0)
        tensors = {"query": query, "key": key, "value": value}
        graph.attend(0, **tensors | WRONG_TENSORS[field](**tensors))

    with pytest.raises(InvalidArgumentError) as raised:
        graph.capture(step)
    assert raised.value.field == field


def test_a_graph_of_a_daemon_that_was_restarted() -> None:
    """The session goes on, and needs another graph."""
    options = SMALL_POOL | {"session_grace_s": 60}  # also the time that the client has to reconnect
    with Daemon(keeper=True, **options) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        toy = Toy(kv, "cpu")
        graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
        graph.graph.begin(sequences, 2)
        graph.graph.end()
        next_process(daemon, signal.SIGKILL)
        with pytest.raises(StaleStepError):
            graph.graph.begin(sequences, 2)
        again = GraphToy(toy, 1)
        again.graph.begin(sequences, 2)
        again.replay([4])
        again.graph.written([4])
        again.graph.end()
        assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, 4)


def test_a_commit_without_blocks_changes_nothing(kv: Session, toy: Toy) -> None:
    graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])
    graph.graph.begin(sequences, 4)
    for number in range(3):
        graph.replay([number])
        graph.graph.written([number])
    rest = kv.allocate(range(61 * kv.info.block_size))
    graph.replay([3])
    graph.graph.written([3])
    graph.graph.check()
    assert sequences[0].length == 3
    for number in range(4, 8):  # there are slots for these
        graph.replay([number])
        graph.graph.written([number])
        with pytest.raises(OutOfBlocksError):
            graph.graph.check()
    with pytest.raises(OutOfBlocksError):
        graph.replay([8])
    kv.free([rest])
    graph.replay([8])
    graph.graph.written([8])
    graph.graph.end()
    assert kv.describe(sequences, token_ids=True)[0].token_ids == (1, 2, 3, *range(9))
    rest = kv.allocate(range(59 * kv.info.block_size))  # the sequence keeps the blocks that it had slots in
    before = state_of(kv, sequences)
    with pytest.raises(OutOfBlocksError):
        graph.graph.begin(sequences, 6)
    assert state_of(kv, sequences) == before
    kv.free([rest])


def test_wrong_arguments(kv: Session, toy: Toy) -> None:
    sizes: Any
    for sizes in ((0, 9), (1, 0), (1, 1.5), (1, kv.info.max_sequence_tokens + 1)):
        with pytest.raises(InvalidArgumentError):
            DecodeGraph(kv, *sizes)
    graph, sequences = GraphToy(toy, 2), toy.compute(*PROMPTS)
    with pytest.raises(FailedPreconditionError, match="capture"):
        graph.graph.attend(0, *toy.tensors(graph.tokens, graph.tokens, 0))
    with pytest.raises(InvalidArgumentError) as raised:
        graph.graph.begin(sequences)
    assert raised.value.field == "sequences"
    with pytest.raises(InvalidArgumentError):
        graph.graph.begin(sequences[:2], 0)
    for call in (graph.graph.replay, graph.graph.check, lambda: graph.graph.written([1])):
        with pytest.raises(FailedPreconditionError, match="begin"):
            call()
    graph.graph.begin(sequences[:2])
    graph.replay([1, 2])
    with pytest.raises(InvalidArgumentError):
        graph.graph.written([1])
    with pytest.raises(FailedPreconditionError, match="in use"):
        graph.graph.capture(lambda: None)
    graph.graph.end()
    with pytest.raises(FailedPreconditionError, match="layers"):
        graph.graph.capture(lambda: None)
    with pytest.raises(FailedPreconditionError, match="capture"):
        graph.graph.begin(sequences[:1])


def test_who_may_not_write_the_pool_gets_none(open_daemon: OpenDaemon) -> None:
    address = open_daemon("float32", "read").address
    with KVClient(address) as client, client.session() as kv, pytest.raises(PoolNotSharedError):
        DecodeGraph(kv, 1, MAX_TOKENS)


class Kernels:
    """Kernels on a GPU, which a call of the session waits for."""

    is_busy = True
    num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_calls_wait_for_replays(kv: Session) -> None:
    kernels: Any = Kernels()
    kv._core.context.connection.kernels.add(kernels)
    kv.free([kv.allocate([1])])
    assert kernels.num_waits == 2
    kernels.is_busy = False
    kv.free([kv.allocate([1])])
    assert kernels.num_waits == 2
