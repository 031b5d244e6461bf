"""Decode passes in runs ahead of the daemon, with model and pool in host memory, where there is no graph but the rest
is the same: the tokens of `generate`, what the daemon knows, and what ends a run."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from cache_argument import cache_of, cached
from each_row import each_row
from model_families import FAMILIES, build
from transformers import PreTrainedModel

from kvservice.client import KVClient, Session
from kvservice.client.decode_graph import StepsAhead
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, StaleStepError
from kvservice.integrations.transformers import DecodeGraphs, KVServiceCache, install, pool_options, uninstall
from kvservice.launch import Daemon

NUM_BLOCKS = 256


class Rig:
    """A model with its graphs, and the same weights with the library's own cache."""

    def __init__(self, family: str, client: KVClient, max_tokens: int = 128) -> None:
        self.model: Any = build(family)
        self.reference: Any = copy.deepcopy(self.model)
        self.reference.set_attn_implementation("eager")
        install(self.model)
        self.kv: Session = client.session()
        self.kv.reset_prefix_cache()
        self.graphs = DecodeGraphs(self.model, self.kv, max_tokens=max_tokens, num_steps=3)

    def cache(self, **options: Any) -> KVServiceCache:
        return KVServiceCache(self.kv, graphs=self.graphs, **options)

    def expected(self, **arguments: Any) -> torch.Tensor:
        arguments = {"attention_mask": torch.ones_like(arguments["input_ids"])} | arguments
        tokens: torch.Tensor = self.reference.generate(**arguments, do_sample=False)
        return tokens

    def generate(self, cache: KVServiceCache, **arguments: Any) -> torch.Tensor:
        mask = torch.ones_like(arguments["input_ids"])  # the library takes zeros in a row for padding
        arguments = {"attention_mask": mask} | arguments
        tokens: torch.Tensor = self.model.generate(**arguments, do_sample=False, **cached(cache))
        return tokens

    def close(self) -> None:
        uninstall(self.model)
        self.kv.close()


MakeRig = Callable[..., Rig]


@pytest.fixture(scope="module")
def clients() -> Iterator[Callable[[PreTrainedModel], KVClient]]:
    """Return a client of a daemon with the pool of a model. There is one daemon per shape."""
    with ExitStack() as stack:
        connected: dict[str, KVClient] = {}

        def connect(model: PreTrainedModel) -> KVClient:
            options = pool_options(model.config, torch.float32)
            if str(options) not in connected:
                sizes: dict[str, Any] = {"block_size": 4, "num_blocks": NUM_BLOCKS, "watermark": 0.0}
                daemon = stack.enter_context(Daemon(**options, **sizes, swap_space_gib=0.01, share_pool="write"))
                connected[str(options)] = stack.enter_context(KVClient(daemon.address))
            return connected[str(options)]

        yield connect


@pytest.fixture
def make(clients: Callable[[PreTrainedModel], KVClient]) -> Iterator[MakeRig]:
    with ExitStack() as stack, torch.no_grad():

        def rig(family: str = "llama", **options: Any) -> Rig:
            made = Rig(family, clients(build(family)), **options)
            stack.callback(made.close)
            return made

        yield rig


def steps_of_one_token(kv: Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each decode pass that asks the daemon for a step. Passes ahead of it do not."""
    counts: list[int] = []
    append = kv.append

    def counting(sequences: Any, *arguments: Any, num_tokens: list[int], **options: Any) -> Any:
        if set(num_tokens) == {1}:
            counts.append(len(num_tokens))
        return append(sequences, *arguments, num_tokens=num_tokens, **options)

    monkeypatch.setattr(kv, "append", counting)
    return counts


def assert_tokens_of_generate(rig: Rig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of_one_token(rig.kv, monkeypatch)
    arguments = {**batch, "max_new_tokens": 20}
    expected = rig.expected(**arguments)
    for _ in range(2):
        with rig.cache() as cache:
            tokens = rig.generate(cache, **arguments)
            assert torch.equal(tokens, expected)
            for row, (sequence, length) in enumerate(zip(cache.sequences, (18, 13, 6), strict=True)):
                assert sequence is not None
                (found,) = rig.kv.describe([sequence], token_ids=True)
                assert list(found.token_ids) == tokens[row, 18 - length : -1].tolist()
                assert found.num_computed_tokens == found.length == sequence.length
    assert steps == []


def test_the_tokens_of_generate(make: MakeRig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with each_row() as row:
        for family in FAMILIES:
            with row(family):
                assert_tokens_of_generate(make(family), batch, monkeypatch)


def test_logits_are_the_callers(make: MakeRig) -> None:
    rig = make()
    ids, cache = torch.arange(1, 13).reshape(2, 6), rig.cache()
    rig.model(ids[:, :3], **cached(cache))
    reference = rig.reference(ids).logits
    found = []
    for column in range(3, 6):
        inputs = {"input_ids": ids[:, column : column + 1], "position_ids": torch.tensor([[column]])}
        output = rig.model(**inputs, return_dict=True, **cached(cache))
        assert cache_of(output) is cache
        assert output.logits.shape == (2, 1, 97)
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1), reference[:, 3:], atol=1e-3, rtol=0)


def test_other_loops_of_the_library(make: MakeRig) -> None:
    prompt = torch.tensor([[5, 9, 23, 61, 7, 5, 9, 23, 44, 8, 5, 9]])
    rows: list[dict[str, Any]] = [{"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}]
    with each_row() as row:
        for loop in rows:
            rig, arguments = make(), {"input_ids": prompt, "max_new_tokens": 15} | loop
            with row(loop):
                assert torch.equal(rig.generate(rig.cache(), **arguments), rig.expected(**arguments))


def test_a_conversation_and_forks(make: MakeRig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    steps = steps_of_one_token(rig.kv, monkeypatch)
    cache = rig.cache()
    first = rig.generate(cache, **batch, max_new_tokens=8)
    ids = torch.cat([first, torch.randint(1, 97, (3, 4))], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 12, dtype=torch.long)], 1)
    arguments = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 7}
    expected = rig.expected(**arguments)
    fork = copy.deepcopy(cache)
    for one in (fork, cache):
        assert torch.equal(rig.generate(one, **arguments), expected)
    assert steps == []


def test_caches_take_turns(make: MakeRig) -> None:
    rig = make()
    prompts = torch.randint(1, 97, (2, 1, 9))
    expected = [rig.expected(input_ids=prompt, max_new_tokens=11) for prompt in prompts]
    caches = [rig.cache(), rig.cache()]
    inputs: list[torch.Tensor] = [*prompts]
    for number in range(10):
        for row, cache in enumerate(caches):
            if number in (4, 7) and row == 0:
                continue  # the other one goes on
            inputs[row] = rig.generate(cache, input_ids=inputs[row], max_new_tokens=1)
    for row, cache in enumerate(caches):
        left = 11 - (inputs[row].shape[1] - 9)
        assert torch.equal(rig.generate(cache, input_ids=inputs[row], max_new_tokens=left), expected[row])
    del cache
    caches.clear()  # the next run begins where that of a dropped cache was
    gc.collect()
    assert torch.equal(rig.generate(rig.cache(), input_ids=prompts[0], max_new_tokens=11), expected[0])


def test_a_step_that_has_ended_takes_columns_along(make: MakeRig) -> None:
    rig = make()
    cache, prompt = rig.cache(), torch.randint(1, 97, (1, 9))
    expected = rig.expected(input_ids=prompt, max_new_tokens=20)
    tokens = rig.generate(cache, input_ids=prompt, max_new_tokens=1)
    (run_sequence,) = cache.sequences
    assert run_sequence is not None
    tokens = rig.generate(cache, input_ids=tokens, max_new_tokens=7)
    rig.kv.fork(run_sequence)
    with pytest.raises(StaleStepError):
        rig.generate(cache, input_ids=tokens, max_new_tokens=12)
    assert 9 <= cache.get_seq_length() == run_sequence.length < 16
    assert torch.equal(rig.generate(cache, input_ids=tokens, max_new_tokens=12), expected)
    rig.kv.fork(run_sequence)
    cache.reset()
    assert torch.equal(rig.generate(cache, input_ids=prompt, max_new_tokens=20), expected)


def test_sequences_that_were_changed_elsewhere_are_refused(make: MakeRig, batch: Any) -> None:
    rig = make()
    for cache in (rig.cache(), KVServiceCache(rig.kv)):
        tokens = rig.generate(cache, **batch, max_new_tokens=5)
        changed = cache.sequences[0]
        assert changed is not None
        rig.kv.truncate(changed, changed.length - 2)
        with pytest.raises(FailedPreconditionError, match="changed elsewhere"):
            rig.generate(cache, input_ids=tokens, max_new_tokens=5)


def test_an_interrupt_beside_a_commit(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit ends first: the cache then has the tokens that the daemon knows."""
    rig = make()
    prompt = torch.randint(1, 97, (1, 9))
    expected = rig.expected(input_ids=prompt, max_new_tokens=20)
    go_on, commit, num_commits = threading.Event(), rig.kv.commit_ahead, 0

    def slow_commit(*arguments: Any, **options: Any) -> Any:
        nonlocal num_commits
        num_commits += 1
        if num_commits == 2:
            go_on.wait(20)
        return commit(*arguments, **options)

    def interrupt(_: StepsAhead) -> None:
        threading.Timer(0.1, go_on.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.kv, "commit_ahead", slow_commit)
    cache = rig.cache()
    with monkeypatch.context() as patch:
        patch.setattr(StepsAhead, "close", interrupt)
        rig.generate(cache, input_ids=prompt, max_new_tokens=8)
        with pytest.raises(KeyboardInterrupt):
            _ = cache.sequences  # ends the run
    known = cache.get_seq_length()
    assert [known] == [found.length for found in rig.kv.describe()]
    assert torch.equal(rig.generate(cache, input_ids=expected[:, : known + 1], max_new_tokens=28 - known), expected)


def test_sequences_outgrow_the_graph(make: MakeRig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(max_tokens=25)
    steps = steps_of_one_token(rig.kv, monkeypatch)
    arguments = {**batch, "max_new_tokens": 20}
    assert torch.equal(rig.generate(rig.cache(), **arguments), rig.expected(**arguments))
    # The longest prompt has 18 tokens: 7 of the 19 passes are ahead.
    assert steps == [3] * 12


def test_a_full_pool(make: MakeRig, batch: Any) -> None:
    """There are blocks for the tokens, but not for twice as many steps."""
    rig = make()
    rest = [rig.kv.allocate(range(1000 * i, 1000 * i + 4 * 46)) for i in range(5)]
    arguments = {**batch, "max_new_tokens": 20}
    assert torch.equal(rig.generate(rig.cache(), **arguments), rig.expected(**arguments))
    rig.kv.free(rest)


def test_what_is_never_shared_is_not_captured(make: MakeRig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    steps = steps_of_one_token(rig.kv, monkeypatch)
    arguments = {**batch, "max_new_tokens": 5}
    for cache in (rig.cache(share=False), KVServiceCache(rig.kv)):
        assert torch.equal(rig.generate(cache, **arguments), rig.expected(**arguments))
    assert steps == [3] * (4 + 4)


def test_a_model_that_cannot_be_captured(
    make: MakeRig, batch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph computes the three rows as one row of three tokens."""
    rig = make()
    embeddings = rig.model.get_input_embeddings()

    def failing(input_ids: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape != (1, 3), "not captured"
        return type(embeddings).forward(embeddings, input_ids)

    monkeypatch.setattr(embeddings, "forward", failing)
    arguments = {**batch, "max_new_tokens": 5}
    for _ in range(2):
        assert torch.equal(rig.generate(rig.cache(), **arguments), rig.expected(**arguments))
    (record,) = caplog.records
    assert "not captured" in record.getMessage()


def test_other_weights_are_captured_again(make: MakeRig, batch: Any) -> None:
    rig = make()
    for _ in range(2):
        arguments = {**batch, "max_new_tokens": 6}
        assert torch.equal(rig.generate(rig.cache(), **arguments), rig.expected(**arguments))
        for model in (rig.model, rig.reference):
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(1, 0))


def test_wrong_arguments(make: MakeRig) -> None:
    rig, other = make(), make()
    with pytest.raises(InvalidArgumentError):
        KVServiceCache(rig.kv, graphs=other.graphs)
    with pytest.raises(InvalidArgumentError):
        KVServiceCache(rig.kv, graphs="yes")  # type: ignore[arg-type]
    sizes: Any
    for sizes in ({"max_tokens": 0}, {"max_tokens": 9, "num_steps": 0}, {"max_tokens": 9, "num_steps": 2.5}):
        with pytest.raises(InvalidArgumentError):
            DecodeGraphs(rig.model, rig.kv, **sizes)
    with pytest.raises(FailedPreconditionError, match="install"):
        DecodeGraphs(rig.reference, rig.kv, max_tokens=9)
