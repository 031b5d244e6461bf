"""Supported models: the shape of the pool that they need, their installation, and their passes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import CodeType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvservice import model_shape
from kvservice.client import Step
from kvservice.config_sources import checked_config
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import attention, keys, own_attention, probe
from kvservice.integrations.transformers.arguments import CACHE, given_cache, library_model
from kvservice.integrations.transformers.attention import ATTENTION_NAME, ForwardPass, running
from kvservice.integrations.transformers.cache import KVServiceCache
from kvservice.integrations.transformers.probe import first_position

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# An attribute of installed models, and of their copies: the previous attention implementation.
_PREVIOUS_ATTENTION = "_kvservice_previous_attention"


def pool_options(config: PreTrainedConfig, dtype: torch.dtype | str | None = None) -> dict[str, Any]:
    """Return the pool's shape for a model: `num_layers`, `num_kv_heads`, `head_size` and `dtype`, named as in the
    daemon's configuration. `dtype` defaults to the model configuration's, and that to float32.

    Raises InvalidArgumentError for models that cannot keep their K/V in a pool (see `install`), and for shapes that the
    daemon does not support: the head size must be a multiple of 8 from 32 to 256.
    """
    for problem in _config_problems(config):
        raise InvalidArgumentError(problem, field="config")
    shape = model_shape.pool_options(config.to_dict())
    options = asdict(shape) | ({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")})
    checked_config(options)
    return options


def install(model: ModelT) -> ModelT:
    """Switch a causal language model, in place, to attention in the daemon. Returns the model. Of a PeftModel it is the
    model inside.

    From then on it runs with `cache=KVServiceCache(...)` (`past_key_values=` before version 5.24 of the library), or
    through `forward`; `uninstall` switches it back. The installation runs one token through the model to check its
    attention.

    Raises InvalidArgumentError, with the reason, for models that the daemon does not support: encoders and
    cross-attention, latent, linear or chunked attention, attention sinks, layers that share K/V or differ in their
    heads, models with their own attention code or masks. The model is unchanged then.
    """
    inside = library_model(model)
    if not _is_switched_on(inside):
        _install(inside)
    return model


def _install(model: PreTrainedModel) -> None:
    uninstall(model)
    pool = pool_options(model.config)
    if not model._can_set_attn_implementation() and not own_attention.is_adaptable(model):
        raise InvalidArgumentError(
            f"{type(model).__name__} has attention code of its own, outside the library's registry", field="model"
        )
    previous_attention = model.config._attn_implementation
    _switch_on(model)
    try:
        for problem in probe.attention_problems(model, pool):
            raise InvalidArgumentError(problem, field="model")
    except InvalidArgumentError:
        _switch_off(model, previous_attention)
        raise
    vars(model)[_PREVIOUS_ATTENTION] = previous_attention
    track(model)


def uninstall(model: ModelT) -> ModelT:
    """Restore a model's previous attention. Returns the model."""
    inside = library_model(model)
    if is_installed(inside):
        untrack(inside)
        keys.forget(inside)
        _switch_off(inside, vars(inside).pop(_PREVIOUS_ATTENTION))
    return model


def is_installed(model: PreTrainedModel) -> bool:
    """Return whether a model was installed, even if its attention has changed since."""
    return _PREVIOUS_ATTENTION in vars(model)


def _is_switched_on(model: PreTrainedModel) -> bool:
    """Return whether a model is installed and its attention and layers have not changed since."""
    configs = [vars(module)["config"] for module in model.modules() if "config" in vars(module)]
    attends = all(getattr(config, "_attn_implementation", ATTENTION_NAME) == ATTENTION_NAME for config in configs)
    return is_installed(model) and attends and own_attention.is_adapted(model)


def _switch_on(model: PreTrainedModel) -> None:
    if own_attention.is_adaptable(model):
        own_attention.adapt(model)
        model.config._attn_implementation = ATTENTION_NAME
    else:
        model.set_attn_implementation(ATTENTION_NAME)


def _switch_off(model: PreTrainedModel, previous_attention: str) -> None:
    own_attention.restore(model)
    if model.config._attn_implementation == ATTENTION_NAME:
        model.config._attn_implementation = previous_attention


def check_installed(model: PreTrainedModel) -> None:
    if not is_installed(model):
        raise FailedPreconditionError("the model computes its attention itself: install() it first")


def _config_problems(config: PreTrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "models with cross-attention are not supported"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "attention has to be causal"
    if config.get_text_config(decoder=True) is not config:
        yield "only plain text models are supported"
    layers = config.per_layer_config if hasattr(config, "num_hidden_layers") else []
    if not layers or any(getattr(layer, "num_attention_heads", None) is None for layer in layers):
        yield "the model has no attention heads"
    if any(getattr(layer, "kv_lora_rank", None) is not None for layer in layers):
        yield "multi-head latent attention is not supported"
    if config.model_type == "falcon" and config.alibi:
        # The rounding changes logits from 256 tokens on.
        yield "ALiBi biases that the library rounds to bfloat16 are not supported"
    layer_types = get_layer_types_and_kwargs(config)[0]
    if unsupported := set(layer_types) - _LAYER_TYPES:
        yield f"layers of type {', '.join(sorted(unsupported))} are not supported"
    if len(layer_types) < len(layers) or getattr(config, "num_kv_shared_layers", None):
        yield "layers that share K/V are not supported"


# ---- calls of an installed model. A call with a KVServiceCache is a pass of that cache; other calls are refused.
#
# The model gets its own `forward` instead of hooks, because torch does not call hooks if a pass is interrupted.


# The instance's previous `forward`, such as accelerate's.
_INNER = "_kvservice_inner_forward"
_WRONG_CACHE = (
    f"an installed model runs with {CACHE}=KVServiceCache(...), or through forward(), but got {{}}. Where the library "
    "calls a model without its caller's cache, for guidance_scale or as an assistant, it needs a model that is not "
    "installed: uninstall() it, or take a copy made before install()"
)


def track(model: PreTrainedModel) -> None:
    """Turn calls of the model into passes of their cache. The wrapper is excluded from torch.compile."""
    kind: Any = type(model)
    if "forward" in vars(model):
        vars(model)[_INNER] = vars(model)["forward"]

    @attention.not_compiled
    @functools.wraps(kind.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _run_pass(self, _bind(kind.forward, args, kwargs))

    # These are bound methods, so that a deep copy of the model gets methods bound to the copy.
    vars(model)["forward"] = MethodType(forward, model)
    if not hasattr(kind, "prepare_inputs_for_generation"):
        return

    @functools.wraps(kind.prepare_inputs_for_generation)
    def prepare(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _prepare(self, _bind(kind.prepare_inputs_for_generation, args, kwargs))

    vars(model)["prepare_inputs_for_generation"] = MethodType(prepare, model)


def untrack(model: PreTrainedModel) -> None:
    """Undo `track`."""
    for name in ("forward", "prepare_inputs_for_generation"):
        vars(model).pop(name, None)
    if _INNER in vars(model):
        vars(model)["forward"] = vars(model).pop(_INNER)


def _bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments except self by name. Raises TypeError for too many of them."""
    if not args:
        return kwargs
    names = list(inspect.signature(function).parameters)[1:]
    if len(args) > len(names):
        raise TypeError(f"{function.__qualname__} takes {len(names)} arguments, not {len(args)}")
    return dict(zip(names, args, strict=False)) | kwargs


def _run_pass(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    inner = vars(model).get(_INNER) or functools.partial(type(model).forward, model)
    _, cache = given_cache(inputs)
    if cache is None and attention.is_running():
        return inner(**inputs)  # called by packed.forward(), which runs the pass
    if not isinstance(cache, KVServiceCache):
        given = "none" if cache is None else f"a {type(cache).__name__}"
        raise FailedPreconditionError(_WRONG_CACHE.format(given))
    _check_model(model, inputs)
    _check_inputs(model, inputs)
    with cache.forward_pass(
        model,
        inputs,
        every_output=_wants_every_output(model, inputs),
        takes_position_ids=_takes_position_ids(type(model).forward),
    ) as call:
        return call(inner)


@functools.cache
def _takes_position_ids(forward: Callable[..., Any]) -> bool:
    """Return whether a model's forward accepts position ids. It is cached because to read a signature takes longer than
    the rest of a decode step's checks."""
    return "position_ids" in inspect.signature(forward).parameters


def _check_model(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    implementation = model.config._attn_implementation
    if implementation != ATTENTION_NAME:
        raise FailedPreconditionError(
            f"the model's attention was changed to {implementation} after install(): install() it again, or "
            "uninstall() it and use another cache"
        )
    input_ids = inputs.get("input_ids")
    refuse_training(model, prompts=not isinstance(input_ids, torch.Tensor) or input_ids.shape[-1] > 1)


def _check_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    if _is_asked_for(model, inputs, "output_attentions"):
        raise InvalidArgumentError("attention weights stay in the daemon", field="output_attentions")
    if inputs.get("use_cache") is False:
        raise InvalidArgumentError(
            "is False, by an argument or by the model's configuration, but the K/V go into the cache that was given: "
            "pass use_cache=True to generate",
            field="use_cache",
        )


def _wants_every_output(model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    """Return whether the caller needs outputs for every column: a loss, hidden states or router logits."""
    flags = {"output_hidden_states", "output_router_logits"} | {name for name in inputs if name.startswith("output_")}
    return inputs.get("labels") is not None or any(_is_asked_for(model, inputs, name) for name in flags)


def _is_asked_for(model: PreTrainedModel, inputs: dict[str, Any], flag: str) -> bool:
    asked = inputs.get(flag)
    return bool(getattr(model.config, flag, False) if asked is None else asked)


def _prepare(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which `generate` calls the model.

    Raises InvalidArgumentError if the cache holds all columns of the inputs. The library would pass the wrong part.
    """
    name, cache = given_cache(inputs)
    num_new = inputs.get("next_sequence_length")
    if isinstance(cache, KVServiceCache) and num_new is not None and num_new <= 0:
        raise InvalidArgumentError(
            f"has no columns beyond the {cache.get_seq_length()} in the cache: pass it with everything that follows, "
            "crop() or reset() the cache, or use a new one",
            field="input_ids",
        )
    kind: Any = type(model)
    prepared: dict[str, Any] = kind.prepare_inputs_for_generation(model, **inputs)
    if isinstance(cache, KVServiceCache) and given_cache(prepared)[1] is None:
        # Longrope changed its frequencies (Phi-3), so the model requires a new cache with all K/V computed again. Older
        # versions of the library prepare only the last column in this case.
        cache.reset()
        everything = inputs | {name: None, "next_sequence_length": None}
        prepared = kind.prepare_inputs_for_generation(model, **everything) | {name: cache}
    return prepared


# ---- forward pass over one ragged step: the tokens of all sequences are concatenated in one row without padding


def forward(
    model: torch.nn.Module,
    step: Step,
    token_ids: Sequence[int] | torch.Tensor,
    *,
    last_only: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run an installed causal language model over the tokens of a step. Its K/V are in the daemon afterwards.

    token_ids: the step's `num_tokens` tokens, in the order of its sequences, which were allocated with
    `extra_keys=model_keys(model)`. Returns logits `[num_tokens, vocabulary]`, or with `last_only` those of the last
    token of each sequence, `[sequences, vocabulary]`, or with `rows`, int64 `[m]`, those of these indices into the
    step's tokens, `[m, vocabulary]`.

    Raises InvalidArgumentError if the number of tokens is not the step's or a row is not one of them, for models whose
    positions cannot be set (see `first_position`), and for sequences so long that the rotary embeddings of others would
    depend on them; FailedPreconditionError if the model is not installed or in training mode, if sequences were
    allocated for another model, or if layers were skipped; and the daemon's errors.
    """
    model = library_model(model)
    check_installed(model)
    prompts = step.num_tokens > len(step.sequences)
    refuse_training(model, prompts)
    keys.check_sequences(model, step.sequences, prompts)
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device).reshape(1, -1)
    if ids.shape[1] != step.num_tokens:
        raise InvalidArgumentError(f"{ids.shape[1]} tokens for a step of {step.num_tokens}", field="token_ids")
    # With a mask of ones the library does not derive sequences from the positions.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    first = first_position(model)
    if first is not None:
        inputs["position_ids"] = torch.from_numpy(first + _positions(step)).to(model.device)[None]
    if first and (ids == model.config.pad_token_id).any():
        raise InvalidArgumentError("padding has no position of its own in this model", field="token_ids")
    if last_only:
        rows = torch.from_numpy(np.cumsum(step.query_lens) - 1)
    if rows is not None:
        inputs["logits_to_keep"] = _checked_rows(rows, step).to(model.device)
    forward_pass = ForwardPass(step)
    with running(forward_pass):
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    forward_pass.check_complete(model.config.num_hidden_layers)
    return logits


def _checked_rows(rows: torch.Tensor, step: Step) -> torch.Tensor:
    if rows.ndim != 1 or rows.dtype != torch.long:
        raise InvalidArgumentError(f"must be int64 [m], not {rows.dtype} {list(rows.shape)}", field="rows")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < step.num_tokens:
        raise InvalidArgumentError(f"must be indices of the step's {step.num_tokens} tokens", field="rows")
    return rows


def _positions(step: Step) -> NDArray[np.int64]:
    """Return the position of each token of the step in its sequence, int64 `[num_tokens]`."""
    starts = np.cumsum(step.query_lens) - step.query_lens
    first_positions = step.context_lens - step.query_lens
    offsets: NDArray[np.int64] = np.repeat(first_positions - starts, step.query_lens)
    return offsets + np.arange(step.num_tokens)


# ---- the training mode of a model's modules, in which dropout would enter the K/V
#
# Only some modules compute otherwise in training: those whose code reads `training`. They are found by a walk at the
# passes that compute prompts; a decode pass looks at their flags alone.


# Attributes from which a module takes the rate of its random changes: those with one of these in their name.
_RATES = ("drop", "jitter", "noise")

# Whether a class reads `training`.
_readers: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_watched: WeakKeyDictionary[PreTrainedModel, list[dict[str, Any]]] = WeakKeyDictionary()


def refuse_training(model: PreTrainedModel, prompts: bool) -> None:
    """Raise FailedPreconditionError, with the name of a module, if the model or a module in it would compute otherwise
    than in evaluation. `prompts`: the pass computes a prompt."""
    if model.training:
        raise FailedPreconditionError("inference only, dropout would enter the cache: call model.eval()")
    watched = _watched.get(model)
    if watched is None or prompts:
        watched = _watched[model] = [vars(one) for one in model.modules() if _reads_training(one.__class__)]
    if not any(attributes["training"] for attributes in watched):
        return
    for name, module in model.named_modules():
        if module.training and _reads_training(module.__class__) and _has_effect(module):
            raise FailedPreconditionError(
                f"inference only, but {name} is in training mode, and would change the K/V at random: call model.eval()"
            )


def _has_effect(module: torch.nn.Module) -> bool:
    """Return whether the training mode of a module that reads it has an effect: unless it has rates and all are 0.
    Modules among its rates count by themselves."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    parts = {**module._modules, **vars(module)}
    rates = [value for name, value in parts.items() if any(word in name for word in _RATES)]
    return not rates or any(_is_positive(rate) for rate in rates)


def _is_positive(rate: Any) -> bool:
    if isinstance(rate, dict):
        return any(map(_is_positive, rate.values()))
    return isinstance(rate, int | float) and rate > 0


def _reads_training(kind: type[torch.nn.Module]) -> bool:
    """Return whether the code of a class reads `training`, besides what all models of torch and the library have."""
    if kind not in _readers:
        _readers[kind] = _mentions_training(kind)
    return _readers[kind]


def _mentions_training(kind: type[torch.nn.Module]) -> bool:
    bases = [base for base in kind.__mro__ if base is not torch.nn.Module]
    return any("training" in names for base in bases for value in vars(base).values() for names in _names(value))


def _names(function: Any) -> Iterator[tuple[str, ...]]:
    """Yield the names in the code of a function, and of the functions around which it is wrapped."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    if isinstance(code, CodeType) and (not module.startswith("transformers.") or ".models." in module):
        yield code.co_names
        yield from (constant.co_names for constant in code.co_consts if isinstance(constant, CodeType))
    if hasattr(function, "__wrapped__"):
        yield from _names(function.__wrapped__)
