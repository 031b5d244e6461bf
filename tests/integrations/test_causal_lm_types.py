"""Every causal language model type of the library: equal to the library's own cache, or refused before it computes.

The expected outcomes are in causal_lm_types.toml. KVSERVICE_TYPES_SEED changes which types run the further scenarios.
"""

from __future__ import annotations

import copy
import inspect
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cache_argument import cached
from causal_lms import (
    README,
    TABLE,
    Case,
    default_config,
    installed_cases,
    listed_types,
    make_config,
    make_model,
    model_class,
    supported_types,
)
from each_row import each_row
from todays_part import ENTRIES
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from kvservice.client import KVClient, Session, Step
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache, forward, install, model_keys, pool_options

pytestmark = pytest.mark.filterwarnings("ignore")  # Tiny random models cause many warnings of the library.

SEED = int(os.environ.pop("KVSERVICE_TYPES_SEED", "11"))
# Logits have a standard deviation of about 1. float32 sums in a different order differ by 1e-6 to 4e-5.
TOLERANCE = 5e-4
CASES = installed_cases()
EQUAL = [case for case in CASES if case.is_equal]
# Types with multi-head, grouped-query and multi-query attention, positions of each kind, windows, soft caps, experts,
# and attention code of their own.
CODE_PATHS = {
    "bert", "bloom", "codegen", "cohere2", "falcon", "falcon-new", "gemma2", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox_japanese", "gptj", "llama", "minimax_m3_vl_text-dense", "mixtral", "modernbert-decoder", "mpt", "roberta",
}  # fmt: skip


@dataclass
class Subject:
    """A model with its K/V in the daemon, and one with the same weights and the library's own cache."""

    model: PreTrainedModel
    reference: PreTrainedModel
    kv: Session


@dataclass
class Output:
    tokens: torch.Tensor
    logits: torch.Tensor


NewCache = Callable[[PreTrainedModel], Cache]
Scenario = Callable[[PreTrainedModel, NewCache], Output]


def prompts() -> dict[str, torch.Tensor]:
    """Three prompts of 18, 13 and 6 tokens, padded on the left, as in conftest.py."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([18, 13, 6])
    mask = (torch.arange(18) >= 18 - lengths[:, None]).long()
    return {"input_ids": torch.randint(2, 97, (3, 18), generator=generator) * mask, "attention_mask": mask}


def generate(model: Any, cache: Cache, **arguments: Any) -> Output:
    arguments = {"do_sample": False, "max_new_tokens": 24} | prompts() | arguments
    torch.manual_seed(5)
    result = model.generate(**arguments, **cached(cache), output_logits=True, return_dict_in_generate=True)
    return Output(result.sequences, torch.stack(result.logits))


def greedy(model: PreTrainedModel, new_cache: NewCache) -> Output:
    return generate(model, new_cache(model))


def short(model: PreTrainedModel, new_cache: NewCache) -> Output:
    return generate(model, new_cache(model), max_new_tokens=4)


def short_with_a_cache(model: PreTrainedModel, new_cache: NewCache) -> Output:
    """MPT uses no cache by default, and the library's generation with one is then wrong."""
    return generate(model, new_cache(model), max_new_tokens=4, use_cache=True)


def one_row(model: PreTrainedModel, new_cache: NewCache) -> Output:
    return generate(model, new_cache(model), input_ids=prompts()["input_ids"][:1], attention_mask=None)


def in_chunks(model: PreTrainedModel, new_cache: NewCache) -> Output:
    cache = new_cache(model)
    chunks = {"prefill_chunk_size": 4} if isinstance(cache, KVServiceCache) else {}
    return generate(model, cache, max_new_tokens=6, **chunks)


def beams(model: PreTrainedModel, new_cache: NewCache) -> Output:
    return generate(model, new_cache(model), max_new_tokens=8, num_beams=3, num_return_sequences=2)


def sampled(model: PreTrainedModel, new_cache: NewCache) -> Output:
    return generate(model, new_cache(model), max_new_tokens=8, do_sample=True, top_k=0, num_return_sequences=2)


def two_turns(model: PreTrainedModel, new_cache: NewCache) -> Output:
    cache = new_cache(model)
    first = generate(model, cache, max_new_tokens=5).tokens
    ids = torch.cat([first, prompts()["input_ids"][:, -4:].flip(0)], 1)
    mask = torch.cat([prompts()["attention_mask"], torch.ones(3, 9, dtype=torch.long)], 1)
    return generate(model, cache, input_ids=ids, attention_mask=mask, max_new_tokens=6)


SCENARIOS: list[Scenario] = [one_row, in_chunks, beams, sampled, two_turns]


def check(subject: Subject, *scenarios: Scenario) -> None:
    """Fail unless the model in the daemon gives the library's results in all scenarios."""
    for scenario in scenarios:
        expected = scenario(subject.reference, lambda model: DynamicCache(config=model.config))
        actual = scenario(subject.model, lambda _: KVServiceCache(subject.kv))
        assert torch.equal(actual.tokens, expected.tokens), f"{scenario.__name__}: other tokens"
        assert_close(actual.logits, expected.logits, scenario.__name__)


def check_ragged_step(subject: Subject) -> None:
    batch = prompts()
    rows = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    expected = torch.cat([subject.reference(row[None]).logits[0] for row in rows])
    subject.kv.reset_prefix_cache()
    keys = [model_keys(subject.model) for _ in rows]
    sequences = subject.kv.allocate_batch([row.tolist() for row in rows], extra_keys=keys)
    actual = forward(subject.model, subject.kv.open_step(sequences), torch.cat(rows))
    subject.kv.free(sequences)
    assert_close(actual, expected, "forward()")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = float((actual - expected).abs().max() / expected.std())
    assert error < TOLERANCE, f"{what}: logits differ by {error} of their standard deviation"


def check_router_logits(subject: Subject) -> None:
    """Router logits are for every column, even if the prompt is cached and only the last logits are requested."""
    inputs: dict[str, Any] = {
        "input_ids": prompts()["input_ids"][:1],
        "logits_to_keep": 1,
        "output_router_logits": True,
    }
    expected = subject.reference(**inputs).router_logits
    for _ in range(2):
        actual = subject.model(**inputs, **cached(KVServiceCache(subject.kv))).router_logits
        assert len(actual or ()) == len(expected or ()), "router logits are missing"
        for one, other in zip(actual or (), expected or (), strict=True):
            assert one.shape == other.shape, f"router logits: {list(one.shape)}, not {list(other.shape)}"
            assert_close(one, other, "router logits")


@dataclass
class Subjects:
    """Makes models that are installed, and lists the layers that were sent to the daemon."""

    clients: Callable[[dict[str, Any]], KVClient]
    attended: list[int]

    @contextmanager
    def of(self, case: Case, config: PreTrainedConfig | None = None) -> Iterator[Subject]:
        config = config or make_config(case)
        options = pool_options(config)
        model = make_model(config)
        reference = copy.deepcopy(model)
        reference.set_attn_implementation("eager")
        install(model)
        with self.clients(options).session() as session:
            session.reset_prefix_cache()
            yield Subject(model, reference, session)


@pytest.fixture
def subjects(clients: Callable[[dict[str, Any]], KVClient], monkeypatch: pytest.MonkeyPatch) -> Iterator[Subjects]:
    made = Subjects(clients, [])
    attend = Step.attend

    def counting(step: Step, layer: int, *tensors: Any, **options: Any) -> Any:
        made.attended.append(layer)
        return attend(step, layer, *tensors, **options)

    monkeypatch.setattr(Step, "attend", counting)
    with torch.no_grad():
        yield made


def drawn(cases: list[Case], draw: str) -> Case:
    return random.Random(f"{SEED} {draw}").choice(cases)


def test_the_table_names_each_case_once() -> None:
    named = [*TABLE["equal"], *(name for names in TABLE["refused"].values() for name in names)]
    assert len(named) == len(set(named))
    assert named


def test_the_readme_lists_the_types_that_are_equal() -> None:
    assert listed_types(README.read_text()) == supported_types(), "run: python tests/support/causal_lms.py"


def refusal_of(subjects: Subjects, case: Case) -> str | None:
    """Return the message with which a type is refused, or None if its results are equal. Fail if it is neither."""
    try:
        with subjects.of(case) as subject:
            # The second time, the prompts are in the prefix cache.
            check(subject, greedy, short)
            check_ragged_step(subject)
            if hasattr(subject.model.config, "output_router_logits"):
                check_router_logits(subject)
    except InvalidArgumentError as error:
        return str(error)
    return None


def assert_types_as_in_the_table(subjects: Subjects, cases: Iterable[Case]) -> None:
    """Fail with all types that are neither equal nor refused as the table says."""
    with each_row() as row:
        for case in cases:
            subjects.attended.clear()
            with row(case.name):
                refusal = refusal_of(subjects, case)
                if refusal is None:
                    assert case.is_equal, "not refused" if case.refusal else "equal, and not named in the table"
                else:
                    assert not case.is_equal, f"refused: {refusal}"
                    assert subjects.attended == [], f"refused after it has computed: {refusal}"
                    assert case.refusal is not None, f"not named in the table, and refused: {refusal}"
                    assert re.search(case.refusal, refusal)


def assert_scenarios_equal(subjects: Subjects, draws: Iterable[int]) -> None:
    with each_row() as row:
        for draw in draws:
            for scenario in SCENARIOS:
                case = drawn(EQUAL, f"{scenario.__name__} {draw}")
                with row((case.name, scenario.__name__, f"KVSERVICE_TYPES_SEED={SEED}")), subjects.of(case) as subject:
                    check(subject, scenario)


def of_each_code_path() -> list[Case]:
    """Return types whose attention differs in code, and the first type of each reason for a refusal."""
    refused = {case.refusal: case for case in reversed(CASES) if case.refusal is not None}
    return [case for case in EQUAL if case.name in CODE_PATHS] + list(refused.values())


def test_types_of_each_code_path_are_equal_or_refused(subjects: Subjects) -> None:
    assert_types_as_in_the_table(subjects, of_each_code_path())


@pytest.mark.slow
def test_every_type_is_equal_or_refused(subjects: Subjects) -> None:
    assert_types_as_in_the_table(subjects, CASES[ENTRIES])


def assert_equal_with_defaults(subjects: Subjects, cases: Iterable[Case]) -> int:
    """Return how many of the types have a default configuration. The library makes no model of some of its own."""
    num_models = 0
    with each_row() as row:
        for case in cases:
            try:
                config = default_config(case)
                make_model(config)
            except Exception:  # any error of the type's own code
                continue
            with row(case.name), subjects.of(case, config) as subject:
                check(subject, short_with_a_cache, short_with_a_cache)
                num_models += 1
    return num_models


def test_types_with_their_own_defaults(subjects: Subjects) -> None:
    """Qwen2-MoE has its windows turned off, as windows of 0 tokens."""
    chosen = ("qwen2_moe", drawn([case for case in EQUAL if case.name in CODE_PATHS], "defaults").name)
    assert assert_equal_with_defaults(subjects, [case for case in EQUAL if case.name in chosen]) > 0


def test_a_type_that_uses_no_cache_by_default_is_refused_with_what_to_do(subjects: Subjects) -> None:
    case = next(case for case in EQUAL if case.name == "mpt")
    refused = pytest.raises(InvalidArgumentError, match=r"pass use_cache=True to generate")
    with subjects.of(case, default_config(case)) as subject, refused:
        short(subject.model, lambda _: KVServiceCache(subject.kv))


@pytest.mark.slow
def test_every_type_with_its_own_defaults(subjects: Subjects) -> None:
    types = [case for case in EQUAL if case.name not in TABLE["variants"]][ENTRIES]
    assert assert_equal_with_defaults(subjects, types) > 0.85 * len(types)


def test_scenarios_on_types_drawn_by_the_seed(subjects: Subjects) -> None:
    assert_scenarios_equal(subjects, [0])


@pytest.mark.slow
def test_more_scenarios_on_types_drawn_by_the_seed(subjects: Subjects) -> None:
    assert_scenarios_equal(subjects, [1, 2, 3])


def ignore_windows(_: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Step.attend
    monkeypatch.setattr(
        Step, "attend", lambda *arguments, **options: attend(*arguments, **options | {"sliding_window": 0})
    )


def shift_positions(model: PreTrainedModel, _: pytest.MonkeyPatch) -> None:
    """Make positions of decode steps one too large. If all were, the model would give the same results."""

    def shift(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = kwargs["position_ids"]
        return args, kwargs | {"position_ids": positions + (positions.shape[1] == 1)}

    model.register_forward_pre_hook(shift, with_kwargs=True)


def attend_to_padding(model: PreTrainedModel, _: pytest.MonkeyPatch) -> None:
    """Take padding for tokens. Their positions stay."""
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True)


def slides(case: Case) -> bool:
    config = make_config(case)
    layer_types = getattr(config, "layer_types", None) or []
    return "sliding_attention" in layer_types or getattr(config, "sliding_window", None) is not None


def takes_positions(case: Case) -> bool:
    return "position_ids" in inspect.signature(model_class(make_config(case)).forward).parameters


def assert_mutants_caught(subjects: Subjects, draws: Iterable[int]) -> None:
    """Fail with all mutants that give the library's results."""
    mutants: dict[Callable[..., None], Callable[[Case], bool]] = {
        ignore_windows: slides,
        shift_positions: takes_positions,
        attend_to_padding: lambda _: True,
    }
    with each_row() as row:
        for draw in draws:
            for mutate, sensitive in mutants.items():
                case = drawn([case for case in EQUAL if sensitive(case)], f"{mutate.__name__} {draw}")
                patched = pytest.MonkeyPatch.context()
                with row((mutate.__name__, case.name)), subjects.of(case) as subject, patched as patch:
                    mutate(subject.model, patch)
                    with pytest.raises(AssertionError, match=r"other tokens|logits differ"):
                        check(subject, greedy)


def test_mutants_are_caught(subjects: Subjects) -> None:
    assert_mutants_caught(subjects, [0])


@pytest.mark.slow
def test_mutants_of_more_types_are_caught(subjects: Subjects) -> None:
    assert_mutants_caught(subjects, [1, 2])
