"""The inputs of `bench serve`: traces of requests, made from a seed or read from a file, and models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvservice.errors import InvalidArgumentError

# ---- traces: prompts, output lengths and arrivals
#
# A file is a JSON object with the list `requests`. Each request has `prompt` (token ids) and `out` (tokens to
# generate), and may have `arrival_s` (0 by default) and `shared` (whether its prompt begins as others do).


MAX_REQUESTS = 100_000
MAX_POSITIONS = 2048
SYSTEM_PROMPT = 128
SYSTEM_PROMPTS = 2
SHARED_PART = 0.5
SIGMA = 0.6
# Mean tokens of prompts (without their system prompt) and of outputs, by the kind of requests.
LENGTHS = {"chat": (120, 90), "document": (900, 50)}


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One request: its prompt int32[n], the tokens to generate, and its arrival in seconds after the start."""

    prompt: npt.NDArray[np.int32]
    num_tokens: int
    arrival_s: float = 0.0
    shared: bool = False


@dataclass(frozen=True)
class ServeTrace:
    """Requests in the order of their arrival."""

    name: str
    requests: tuple[TraceRequest, ...]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return max(len(request.prompt) + request.num_tokens for request in self.requests)

    def cut(self, *num_tokens: int) -> ServeTrace:
        """Return the first requests, with at most these numbers of tokens to generate."""
        kept = (
            TraceRequest(one.prompt, min(one.num_tokens, most), one.arrival_s, one.shared)
            for one, most in zip(self.requests, num_tokens, strict=False)
        )
        return ServeTrace(self.name, tuple(kept))


def make_trace(
    kind: str, seed: int = 0, requests: int = 64, rate: float = 0.0, vocabulary: int = 1024, limit: int = MAX_POSITIONS
) -> ServeTrace:
    """Return a trace of `kind` ("chat", "document" or "mixed", half of each) with lognormal lengths.

    rate: arrivals a second on average (Poisson); 0 for all at once. Half of the requests begin with one of two system
    prompts. No request has more than `limit` tokens.
    """
    rng = np.random.default_rng(seed)
    system = rng.integers(3, vocabulary, (SYSTEM_PROMPTS, SYSTEM_PROMPT), dtype=np.int32)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests)) if rate else np.zeros(requests)

    def length(mean: float, most: int) -> int:
        return int(np.clip(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA), 8, most))

    made = []
    for arrival_s in arrivals.tolist():
        prompt_mean, output_mean = LENGTHS[str(rng.choice(list(LENGTHS))) if kind == "mixed" else kind]
        num_tokens = length(output_mean, limit // 4)
        own = rng.integers(3, vocabulary, length(prompt_mean, limit // 2), dtype=np.int32)
        shared = bool(rng.random() < SHARED_PART)
        prompt = np.concatenate([system[rng.integers(SYSTEM_PROMPTS)], own]) if shared else own
        made.append(TraceRequest(prompt, num_tokens, arrival_s, shared))
    arriving = f"{rate:g} a second" if rate else "all at once"
    return ServeTrace(f"{kind}, {arriving}, seed {seed}", tuple(made))


def read_trace(path: str, vocabulary: int = 1024, limit: int = MAX_POSITIONS) -> ServeTrace:
    """Read a trace for a model with this vocabulary and this many positions. Raises InvalidArgumentError."""
    try:
        rows = json.loads(Path(path).read_text())["requests"]
        requests = [_request(row, number, vocabulary, limit) for number, row in enumerate(rows)]
    except KeyError as error:
        raise InvalidArgumentError(f"is not a trace: {error} is missing", field="trace") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"is not a trace: {error!r}", field="trace") from error
    if not 0 < len(requests) <= MAX_REQUESTS:
        raise InvalidArgumentError(f"has {len(requests)} requests, not 1 to {MAX_REQUESTS}", field="trace")
    return ServeTrace(Path(path).name, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _request(row: dict[str, Any], number: int, vocabulary: int, limit: int) -> TraceRequest:
    where = f"requests[{number}]"
    prompt, num_tokens, arrival_s = row["prompt"], row["out"], row.get("arrival_s", 0.0)
    if not prompt or not all(type(token) is int and 0 <= token < vocabulary for token in prompt):
        raise InvalidArgumentError(f"{where}.prompt must be token ids below {vocabulary}", field="trace")
    if type(num_tokens) is not int or not 0 < num_tokens <= limit - len(prompt):
        raise InvalidArgumentError(
            f"{where}.out must be a number from 1 to {limit - len(prompt)}: the model has {limit} positions",
            field="trace",
        )
    if not isinstance(arrival_s, int | float) or not 0 <= arrival_s < 86_400:
        raise InvalidArgumentError(f"{where}.arrival_s must be seconds of a day", field="trace")
    return TraceRequest(np.array(prompt, np.int32), num_tokens, float(arrival_s), bool(row.get("shared", False)))


# ---- the models: Llamas with random weights, without an end token


SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# 1.3 billion parameters.
LARGE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def shape_of(device: str) -> dict[str, Any]:
    return LARGE if device == "cuda" else SMALL


def build_model(dtype: str, device: str = "cpu", shape: dict[str, Any] | None = None) -> LlamaForCausalLM:
    """Build the model of a device, on it. The weights are 4 times an initialization for training, so that greedy
    choices are not near ties."""
    config = LlamaConfig(
        **(shape or shape_of(device)),
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(), torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    torch.nn.Module.to(model, getattr(torch, dtype))
    model.train(False)
    return model
