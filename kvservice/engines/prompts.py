"""Prompts: texts, token ids and conversations, and their checks before anything is queued for them."""

from __future__ import annotations

import inspect
import json
import operator
import reprlib
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from torch.nn import Embedding
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from kvservice.engines.params import SamplingParams
from kvservice.engines.requests import Prompt
from kvservice.engines.sampling import tokens_of_processors
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers.keys import steady_length
from kvservice.integrations.transformers.probe import first_position

Tool = Mapping[str, Any] | Callable[..., Any]
# Arguments of apply_chat_template that are no variables of the template.
_NO_VARIABLES: Final = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents"
}


@dataclass(frozen=True)
class Verbatim:
    """A text that has its special tokens already."""

    text: str


class ChatArguments(TypedDict, total=False):
    """How the tokenizer's chat template makes a prompt of messages.

    `chat_template`: a template, or the name of one of the tokenizer's, if not its own shall be used. `tools`: JSON
    schemas, or functions with types and a docstring; they are refused if the template ignores them.
    `add_generation_prompt` (true by default) begins the message that answers. `continue_final_message` leaves the last
    message open instead, and the output goes on with it; then `add_generation_prompt` must be false.
    `chat_template_kwargs`: other variables of the template.
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Tool] | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class Conversation:
    """Checked messages and ChatArguments. `field` names the messages in errors."""

    messages: list[dict[str, Any]]
    field: str
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Tool] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, kinds, said in (
            ("chat_template", str | None, "a text"),
            ("add_generation_prompt", bool, "true or false"),
            ("continue_final_message", bool, "true or false"),
            ("tools", list | tuple | None, "a list"),
            ("chat_template_kwargs", Mapping | None, "a dictionary"),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise InvalidArgumentError(f"must be {said}", field=name)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgumentError("needs add_generation_prompt=False", field="continue_final_message")
        for name in self.chat_template_kwargs or ():
            if name in _NO_VARIABLES:
                raise InvalidArgumentError(f"{name} is no variable of a template", field="chat_template_kwargs")
        object.__setattr__(self, "tools", [_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or ())])

    def text(self, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """Return the prompt. Raises InvalidArgumentError naming the messages or the argument."""
        if tokenizer is None:
            raise InvalidArgumentError("need a tokenizer, and there is none", field=self.field)
        if self.chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise InvalidArgumentError("is needed: the tokenizer has none of its own", field="chat_template")
        text = self._render(tokenizer, list(self.tools or ()) or None)
        if self.tools and text == self._render(tokenizer, None):
            raise InvalidArgumentError("have no effect: the chat template ignores them", field="tools")
        return text

    def _render(self, tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    self.messages,
                    tools=tools,
                    chat_template=self.chat_template,
                    add_generation_prompt=self.add_generation_prompt,
                    continue_final_message=self.continue_final_message,
                    tokenize=False,
                    **self.chat_template_kwargs or {},
                )
            )
        except ImportError:
            raise
        except Exception as error:  # a template is a program, which fails as it likes
            reason = f"the chat template cannot be applied: {type(error).__name__}: {error}"
            raise InvalidArgumentError(reason, field=self.field) from error


def conversations_of(messages: object, arguments: ChatArguments) -> list[Conversation]:
    """Return the conversations of a call, which has the messages of one, or a list of several.

    Raises InvalidArgumentError naming the message or the argument.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise InvalidArgumentError("must be a list of messages, or several lists", field="messages")
    listed = list(messages)
    if listed and not any(isinstance(one, Mapping) for one in listed):
        return [_conversation(one, f"messages[{at}]", arguments) for at, one in enumerate(listed)]
    return [_conversation(listed, "messages", arguments)]


def _conversation(messages: object, field: str, arguments: ChatArguments) -> Conversation:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidArgumentError("must be a list of messages", field=field)
    if not messages:
        raise InvalidArgumentError("has no messages", field=field)
    checked = [_message(message, f"{field}[{at}]") for at, message in enumerate(messages)]
    return Conversation(checked, field, **arguments)


def _message(message: object, field: str) -> dict[str, Any]:
    """Return a message as templates take it: its content as one text, arguments of tool calls as dictionaries."""
    if not isinstance(message, Mapping):
        raise InvalidArgumentError('must be a dictionary with "role" and "content"', field=field)
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or not role:
        raise InvalidArgumentError('must be a text, such as "user"', field=f"{field}.role")
    checked = dict(message)
    if isinstance(content, list | tuple):
        checked["content"] = "\n".join(_part(part, f"{field}.content[{at}]") for at, part in enumerate(content))
    elif not isinstance(content, str) and not (content is None and role == "assistant"):
        raise InvalidArgumentError("must be a text, or a list of texts", field=f"{field}.content")
    if calls is not None:
        if not isinstance(calls, list | tuple):
            raise InvalidArgumentError("must be a list", field=f"{field}.tool_calls")
        checked["tool_calls"] = [_call(call, f"{field}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return checked


def _part(part: object, field: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise InvalidArgumentError('must be {"type": "text", "text": ...}: the engine takes only text', field=field)
    return text


def _call(call: object, field: str) -> dict[str, Any]:
    """Return a tool call. Its arguments may be JSON, as in OpenAI's protocol."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidArgumentError('must be a dictionary with "function"', field=field)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"is no JSON: {error}", field=f"{field}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    if not callable(tool):
        raise InvalidArgumentError("must be a JSON schema or a function", field=field)
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # the library has an error for each thing that the function lacks
        raise InvalidArgumentError(f"is no function of which a schema can be made: {error}", field=field) from error
    return schema


# A text, token ids, or a mapping with "input_ids", as tokenizers return it.
PromptLike = str | Iterable[int] | Mapping[str, Any] | Verbatim | Conversation


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model's prompts. `max_length` is the most tokens of a sequence, prompt and output together.

    `vocabulary` counts the tokens that it takes, `num_scores` those that it can choose. `eos_ids` are the ends of the
    sequence among these, and `no_eos_ids` those that its files name though it cannot choose them. `unusable_ids` are
    tokens that it cannot compute: the padding of models such as RoBERTa, which has no position.
    """

    vocabulary: int
    num_scores: int
    max_length: int
    eos_ids: frozenset[int]
    no_eos_ids: frozenset[int]
    unusable_ids: frozenset[int]

    @classmethod
    def of(cls, model: PreTrainedModel, max_sequence_tokens: int) -> ModelLimits:
        """Take the limits from the model's configuration and from the daemon's longest sequence. With longrope or
        dynamic rope it ends where one sequence would change the K/V of others."""
        config = model.config
        longest = min(_num_positions(model) or max_sequence_tokens, steady_length(model) or max_sequence_tokens)
        generation = getattr(model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = config.eos_token_id
        ids = frozenset(map(int, () if eos is None else [eos] if isinstance(eos, int) else eos))
        vocabulary = int(config.vocab_size)
        head: Any = model
        num_scores = min(vocabulary, getattr(head.get_output_embeddings(), "out_features", vocabulary))
        eos_ids = frozenset(one for one in ids if 0 <= one < num_scores)
        length = min(int(longest), max_sequence_tokens)
        return cls(vocabulary, num_scores, length, eos_ids, ids - eos_ids, _unusable_ids(model))


def _unusable_ids(model: PreTrainedModel) -> frozenset[int]:
    padding = getattr(model.config, "pad_token_id", None)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return frozenset([padding]) if padding is not None and takes_positions and first_position(model) else frozenset()


def _num_positions(model: PreTrainedModel) -> int | None:
    """Return the most tokens for which a model has positions, or None without a limit."""
    for name in ("max_position_embeddings", "max_seq_len"):
        longest = getattr(model.config, name, None)
        if longest:
            break
    else:
        return None
    # RoBERTa and its relatives count positions from padding_idx + 1.
    embeddings = [getattr(module, "position_embeddings", None) for module in model.modules()]
    unused = [one.padding_idx + 1 for one in embeddings if isinstance(one, Embedding) and one.padding_idx is not None]
    return int(longest) - max(unused, default=0)


def check_prompt(
    prompt: PromptLike,
    params: SamplingParams,
    limits: ModelLimits,
    tokenizer: PreTrainedTokenizerBase | None,
    field: str = "prompt",
) -> Prompt:
    """Check a prompt and its parameters against the model. The result has no id yet.

    Raises InvalidArgumentError naming `field` or the parameter.
    """
    if isinstance(prompt, Conversation):
        field, prompt = prompt.field, Verbatim(prompt.text(tokenizer))
    complete = isinstance(prompt, Verbatim)
    given = prompt.text if isinstance(prompt, Verbatim) else prompt
    text = given if isinstance(given, str) else None
    if text is not None and tokenizer is None:
        raise InvalidArgumentError("is a text, and there is no tokenizer: pass token ids", field=field)
    if params.stop and tokenizer is None:
        raise InvalidArgumentError("has strings, and there is no tokenizer", field="stop")
    if isinstance(given, str):
        given = _encode(given, tokenizer, field, complete)
    elif isinstance(given, Mapping):
        rows = _encoded(given, field)
        if len(rows) != 1:
            raise InvalidArgumentError(f"has {len(rows)} prompts: pass them alone", field=field)
        given = rows[0]
    token_ids = _token_ids(given, limits, field)
    if not token_ids:
        raise InvalidArgumentError("has no tokens", field=field)
    room = limits.max_length - len(token_ids)
    if room < 1:
        raise InvalidArgumentError(
            f"has {len(token_ids)} tokens, and prompt and output have at most {limits.max_length}", field=field
        )
    if not limits.unusable_ids.isdisjoint(token_ids):
        raise InvalidArgumentError("has the padding token, which has no position in this model", field=field)
    named = {"stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias or ()}
    for name, tokens in (*named.items(), ("logits_processors", tokens_of_processors(params.logits_processors))):
        for token in tokens:
            if not 0 <= token < limits.num_scores:
                raise InvalidArgumentError(f"{token} is not in the vocabulary of {limits.num_scores}", field=name)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return Prompt(0, text, token_ids, params, max_tokens, seed)


def prompts_of(prompts: PromptLike | Iterable[PromptLike], add_special_tokens: bool = True) -> list[PromptLike]:
    """Return the prompts of a call, which has one or several. Raises InvalidArgumentError naming prompts."""
    if isinstance(prompts, str):
        listed: list[Any] = [prompts]
    elif isinstance(prompts, Mapping):
        listed = _encoded(prompts, "prompts")
    elif isinstance(prompts, bytes | Set) or not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise InvalidArgumentError("must be a text, token ids, or several of these", field="prompts")
    else:
        listed = list(prompts)
        listed = [listed] if listed and _is_token(listed[0]) else listed
    if add_special_tokens:
        return listed
    return [Verbatim(one) if isinstance(one, str) else one for one in listed]


def _is_token(value: object) -> bool:
    """Return whether this is a whole number, also one of NumPy or torch."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt: one for all, or one for each."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    of_class = isinstance(params, Sequence) and all(isinstance(one, SamplingParams) for one in params)
    if not of_class:
        raise InvalidArgumentError(
            "must be SamplingParams, one for all prompts or one for each", field="sampling_params"
        )
    if len(params) != num_prompts:
        raise InvalidArgumentError(f"has {len(params)} parameters for {num_prompts} prompts", field="sampling_params")
    return params


def _encode(text: str, tokenizer: PreTrainedTokenizerBase | None, field: str, complete: bool) -> list[int]:
    """Return the tokens of a text; with `complete`, without special tokens that the tokenizer would add."""
    assert tokenizer is not None, "texts without a tokenizer are refused before"
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError("has a surrogate, which no tokenizer can encode", field=field) from None
    try:
        token_ids = list(tokenizer.encode(text, add_special_tokens=not complete))
    except Exception as error:  # foreign code
        raise InvalidArgumentError(f"the tokenizer cannot encode it: {error!r}", field=field) from error
    first = getattr(tokenizer, "bos_token_id", None)
    if not complete and first is not None and token_ids[:2] == [first, first]:
        warnings.warn(
            f"a prompt's text begins with {tokenizer.bos_token}, which the tokenizer adds once more: "
            "pass add_special_tokens=False, or conversations to `chat`",
            stacklevel=2,
        )
    return token_ids


def _encoded(encoding: Mapping[str, Any], field: str) -> list[list[int]]:
    """Return the token ids in a tokenizer's result, of one text or of several, without the padding."""
    ids, mask = (_listed(encoding.get(name)) for name in ("input_ids", "attention_mask"))
    if ids is None:
        raise InvalidArgumentError('must be a text, token ids, or a tokenizer\'s result with "input_ids"', field=field)
    if not ids or _listed(ids[0]) is None:
        ids, mask = [ids], None if mask is None else [mask]
    rows = [_numbers(row, f"{field}.input_ids") for row in ids]
    if mask is None and encoding.get("attention_mask") is None:
        return rows
    masks = [_listed(row) for row in mask or ()]
    if [len(row) for row in rows] != [None if row is None else len(row) for row in masks]:
        raise InvalidArgumentError("has an attention_mask of another shape than its input_ids", field=field)
    if any(kept not in (0, 1) for kept_in_row in masks for kept in kept_in_row or ()):
        raise InvalidArgumentError("has values other than 0 and 1", field=f"{field}.attention_mask")
    return [
        [token for token, kept in zip(row, kept_in_row or (), strict=True) if kept]
        for row, kept_in_row in zip(rows, masks, strict=True)
    ]


def _listed(values: Any) -> list[Any] | None:
    """Return a list of what is a sequence, an array or a tensor, and None of anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str | bytes) else None


def _numbers(values: Any, field: str) -> list[int]:
    """Return token ids as numbers. Raises InvalidArgumentError naming the first value that is none."""
    listed = _listed(values)
    if listed is None:
        if isinstance(values, str | bytes | Set) or hasattr(values, "tolist") or not isinstance(values, Iterable):
            raise InvalidArgumentError(f"must be a text or token ids, not {reprlib.repr(values)}", field=field)
        listed = list(values)
    if set(map(type, listed)) <= {int}:
        return listed
    numbers = [one.tolist() if getattr(one, "ndim", None) == 0 else one for one in listed]  # of NumPy or torch
    for at, one in enumerate(numbers):
        if isinstance(one, bool) or not hasattr(one, "__index__"):
            said = reprlib.repr(one)
            raise InvalidArgumentError(f"must be a text or token ids: {said} at {at} is no token id", field=field)
    return [int(operator.index(one)) for one in numbers]


def _token_ids(prompt: Iterable[int], limits: ModelLimits, field: str) -> tuple[int, ...]:
    rows = _listed(prompt)
    numbers = _numbers(rows[0] if rows and len(rows) == 1 and _listed(rows[0]) is not None else prompt, field)
    outside = [one for one in (min(numbers), max(numbers)) if not 0 <= one < limits.vocabulary] if numbers else ()
    if outside:
        raise InvalidArgumentError(f"{outside[0]} is not in the vocabulary of {limits.vocabulary}", field=field)
    return tuple(numbers)
