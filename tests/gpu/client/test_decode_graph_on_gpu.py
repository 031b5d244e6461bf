"""A decode step as one CUDA graph: outputs over random lengths and block borders, what the daemon knows afterwards, and
steps that have ended. See tests/client/test_decode_graph.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")

from decode_rig import GraphToy, Toy, check_random_runs, check_tables  # noqa: E402  torch may be missing

from kvservice.client import KVClient  # noqa: E402
from kvservice.errors import FailedPreconditionError, StaleStepError  # noqa: E402
from kvservice.launch import Daemon  # noqa: E402

POOL: dict[str, Any] = {
    "device": "cuda",
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_size": 64,
    "block_size": 8,
    "num_blocks": 512,
    "swap_space_gib": 0.01,
    "max_sequence_tokens": 512,
    "share_pool": "write",
}
# Another row stride of the block tables divides attention differently over thread blocks.
BOUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}


@pytest.fixture(scope="module", params=BOUNDS)
def client(request: pytest.FixtureRequest) -> Iterator[KVClient]:
    with Daemon(**POOL, dtype=request.param) as daemon, KVClient(daemon.address) as connected:
        yield connected


@pytest.mark.parametrize("seed", range(4))
def test_random_runs_give_what_appends_give(client: KVClient, seed: int) -> None:
    """The rig compares outputs, tokens and K/V."""
    with client.session() as kv, client.session() as other:
        check_random_runs(kv, other, "cuda:0", seed, BOUNDS[kv.info.dtype])


@pytest.mark.parametrize("seed", range(4))
def test_the_tables_move_on(seed: int) -> None:
    """The rig compares positions, lengths and slots."""
    check_tables(torch.device("cuda:0"), seed)


def test_the_k_and_v_of_two_graphs_and_streams(client: KVClient) -> None:
    """Sequences move from one graph to another, on another stream."""
    with client.session() as kv, client.session() as other:
        toys = Toy(kv, "cuda:0"), Toy(other, "cuda:0")
        prompts = [[1, 2, 3], list(range(20))]
        mine, theirs = (toy.compute(*prompts) for toy in toys)
        graphs = GraphToy(toys[0], 2), GraphToy(toys[0], 3)
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        for number in range(6):
            graph, stream = graphs[number % 2], streams[number % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.graph.begin(mine, 2)
                for token in range(5):
                    expected = toys[1].decode(theirs, [token, number])
                    output = graph.replay([token, number])
                    torch.testing.assert_close(output, expected, rtol=0, atol=BOUNDS[kv.info.dtype])
                    graph.graph.written([token, number])
                graph.graph.end()
        for one, another in zip(mine, theirs, strict=True):
            for part, wanted in zip(kv.read(one, 0, one.length), other.read(another, 0, one.length), strict=True):
                assert part.tobytes() == wanted.tobytes()
        kv.reset_prefix_cache()


def test_replays_without_a_wait_between_them(client: KVClient) -> None:
    """The host queues all replays, and a sequence that is freed meanwhile is freed after them."""
    with client.session() as kv, client.session() as other:
        toy = Toy(kv, "cuda:0")
        graph, (sequence,) = GraphToy(toy, 1), toy.compute([1, 2, 3])
        graph.tokens.fill_(5)
        graph.graph.begin([sequence], 40)
        outputs = [graph.graph.replay().clone() for _ in range(80)]
        for _ in range(40):
            graph.graph.written([5])
        graph.graph.check()
        assert sequence.length == 43
        kv.free([sequence])
        # Others get its blocks.
        theirs = Toy(other, "cuda:0")
        (again,) = theirs.compute([1, 2, 3])
        for output in outputs:
            expected = theirs.decode([again], [5])
            torch.testing.assert_close(output.float().cpu(), expected, rtol=0, atol=BOUNDS[kv.info.dtype])
        with pytest.raises(StaleStepError):
            graph.graph.replay()
        with pytest.raises(StaleStepError):
            graph.graph.end()
        kv.reset_prefix_cache()


def test_a_step_that_cannot_be_captured_leaves_the_graph_usable(client: KVClient) -> None:
    with client.session() as kv:
        toy = Toy(kv, "cuda:0")
        graph, sequences = GraphToy(toy, 1), toy.compute([1, 2, 3])

        def fails_in_the_capture() -> None:
            graph.run_step()
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("refused")

        with pytest.raises(RuntimeError, match="refused"):
            graph.graph.capture(fails_in_the_capture)
        with pytest.raises(FailedPreconditionError, match="capture"):
            graph.graph.begin(sequences)
        graph.graph.capture(graph.run_step)
        graph.graph.begin(sequences)
        graph.replay([1])
        graph.graph.written([1])
        graph.graph.end()
        assert sequences[0].length == 4
        kv.reset_prefix_cache()
