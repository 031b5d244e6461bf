"""Conversations become prompts as the tokenizer's chat template says, and so does what the library returns of them."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from each_row import each_row
from known_logits import small_config
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvservice.cli import main
from kvservice.engines import LLM, AsyncLLM, SamplingParams
from kvservice.errors import InvalidArgumentError

WORDS = ["<s>", "</s>", "<unk>", "user:", "assistant:", "system:", "tools:", "f", "hello", "you", "good", "day", "x=1"]
TEMPLATE = (
    "{{ bos_token }} {% if tools %}tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('robots do not speak') }}{% endif %}"
    "{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls %} {{ call.function.name }} x={{ call.function.arguments.x }}{% endfor %}"
    " {% if not loop.last %}</s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}</s> assistant:{% endif %}{% if polite %} good{% endif %}"
)
HELLO = [{"role": "user", "content": "hello you"}]
CALLED: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "good"}, {"type": "text", "text": "day"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    },
]
ONE = SamplingParams(temperature=0, max_tokens=2)


def f(x: int) -> int:
    """Do it.

    Args:
        x: A number.
    """
    return x


def made_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts the token of the sequence's begin before a text."""
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return made_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(small_config(64)).eval()


@pytest.fixture(scope="module")
def chatty(model, tokenizer, small_daemon) -> Iterator[LLM]:
    with LLM(model, tokenizer, address=small_daemon.address) as llm:
        yield llm


def test_conversations_are_prompts_as_the_template_makes_them(chatty) -> None:
    rows: list[tuple[Any, dict[str, Any], list[str]]] = [
        (HELLO, {}, ["<s> user: hello you </s> assistant:"]),
        ([HELLO, CALLED], {}, [
            "<s> user: hello you </s> assistant:", "<s> system: good\nday </s> assistant:  f x=1 </s> assistant:",
        ]),
        (HELLO, {"add_generation_prompt": False}, ["<s> user: hello you "]),
        ([*HELLO, {"role": "assistant", "content": "good"}],
         {"continue_final_message": True, "add_generation_prompt": False},
         ["<s> user: hello you </s> assistant: good"]),
        (HELLO, {"tools": [f]}, ["<s> tools: f user: hello you </s> assistant:"]),
        (HELLO, {"tools": [{"type": "function", "function": {"name": "hello"}}]},
         ["<s> tools: hello user: hello you </s> assistant:"]),
        (HELLO, {"tools": []}, ["<s> user: hello you </s> assistant:"]),
        (HELLO, {"chat_template_kwargs": {"polite": True}}, ["<s> user: hello you </s> assistant: good"]),
        (HELLO, {"chat_template": "{{ messages[0].content }} day"}, ["hello you day"]),
    ]  # fmt: skip
    with each_row() as row:
        for messages, arguments, prompts in rows:
            with row((messages, arguments)):
                outputs = chatty.chat(messages, ONE, **arguments)
                assert [output.prompt for output in outputs] == prompts
                words = [[WORDS[token] for token in output.prompt_token_ids] for output in outputs]
                assert words == [prompt.split() for prompt in prompts], "and no token is added"
                assert all(output.outputs[0].token_ids for output in outputs)


def test_what_is_no_conversation_is_refused_with_its_place(chatty) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"function": {"name": "f", "arguments": "{"}}
    rows: list[tuple[Any, dict[str, Any], str, str]] = [
        ("hello", {}, "messages", "must be a list of messages"),
        ({"role": "user", "content": "x"}, {}, "messages", "must be a list of messages"),
        ([], {}, "messages", "has no messages"),
        ([HELLO, []], {}, "messages[1]", "has no messages"),
        ([HELLO, "hello"], {}, "messages[1]", "must be a list of messages"),
        ([*HELLO, "hello"], {}, "messages[1]", "must be a dictionary"),
        ([HELLO, [*HELLO, 5]], {}, "messages[1][1]", "must be a dictionary"),
        ([{"content": "hello"}], {}, "messages[0].role", "must be a text"),
        ([HELLO, [{"role": "user"}]], {}, "messages[1][0].content", "must be a text"),
        ([{"role": "user", "content": 5}], {}, "messages[0].content", "must be a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "messages[0].content[0]", "takes only text"),
        ([{"role": "assistant", "tool_calls": 5}], {}, "messages[0].tool_calls", "must be a list"),
        ([{"role": "assistant", "tool_calls": [5]}], {}, "messages[0].tool_calls[0]", '"function"'),
        ([{"role": "assistant", "tool_calls": [call]}], {}, "messages[0].tool_calls[0].function.arguments", "no JSON"),
        ([HELLO, [{"role": "robot", "content": ""}]], {}, "messages[1]", "robots do not speak"),
        ([HELLO, [{"role": "user", "content": "x " * 5000}]], {}, "messages[1]", "at most 4096"),
        (HELLO, {"chat_template": "{{ messages[0].content "}, "messages", "TemplateSyntaxError"),
        (HELLO, {"chat_template": 5}, "chat_template", "must be a text"),
        (HELLO, {"chat_template": "hello", "tools": [tool]}, "tools", "the chat template ignores them"),
        (HELLO, {"tools": [tool, 5]}, "tools[1]", "must be a JSON schema or a function"),
        (HELLO, {"tools": [lambda x: x]}, "tools[0]", "schema"),
        (HELLO, {"tools": 5}, "tools", "must be a list"),
        (HELLO, {"continue_final_message": True}, "continue_final_message", "add_generation_prompt=False"),
        (HELLO, {"add_generation_prompt": "no"}, "add_generation_prompt", "must be true or false"),
        (HELLO, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize is no variable"),
        (HELLO, {"chat_template_kwargs": [1]}, "chat_template_kwargs", "must be a dictionary"),
    ]
    with each_row() as row:
        for messages, arguments, field, said in rows:
            with row((repr(messages)[:60], arguments)):
                with pytest.raises(InvalidArgumentError) as refused:
                    chatty.chat(messages, ONE, **arguments)
                assert refused.value.field == field
                assert said in str(refused.value)


def test_chat_needs_a_template(model, small_daemon) -> None:
    for tokenizer, field, said in ((None, "messages", "tokenizer"), (made_tokenizer(None), "chat_template", "none")):
        with LLM(model, tokenizer, address=small_daemon.address) as llm:
            with pytest.raises(InvalidArgumentError, match=said) as refused:
                llm.chat(HELLO)
            assert refused.value.field == field


def test_what_the_library_returns_is_a_prompt(chatty, tokenizer) -> None:
    expected = chatty.chat([HELLO, CALLED], ONE, add_generation_prompt=False)
    first, second = ([list(output.prompt_token_ids)] for output in expected)
    normal: list[dict[str, Any]] = [CALLED[0], {"role": "assistant", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}]  # fmt: skip
    normal[0] = {"role": "system", "content": "good\nday"}
    apply, both = tokenizer.apply_chat_template, [HELLO, normal]
    tokenizer.pad_token = "</s>"
    rows = [
        (apply(HELLO), first),
        (apply(HELLO, return_dict=False), first),
        (apply(HELLO, return_tensors="pt"), first),
        (apply(HELLO, return_tensors="np"), first),
        (apply(HELLO, return_tensors="pt", return_dict=False), first),
        ([apply(HELLO), apply(normal, return_tensors="pt")], first + second),
        (apply(both), first + second),
        (apply(both, return_dict=False), first + second),
        (apply(both, padding=True, return_tensors="pt"), first + second),
        (dict(apply(both, padding=True)), first + second),
    ]
    with each_row() as row:
        for prompts, ids in rows:
            with row(prompts):
                assert [list(output.prompt_token_ids) for output in chatty.generate(prompts, ONE)] == ids
    for wrong, said in (
        ({"ids": [5]}, "input_ids"),
        ([apply(both)], "has 2 prompts"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "another shape"),
        ({"input_ids": 5}, "input_ids"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            chatty.generate(wrong, ONE)


def test_a_text_with_its_special_tokens_gets_no_others_or_a_warning(chatty) -> None:
    text = "<s> user: hello"
    with pytest.warns(UserWarning, match="begins with <s>.*add_special_tokens=False"):
        (twice,) = chatty.generate(text, ONE)
    assert twice.prompt_token_ids == (0, 0, 3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (once,) = chatty.generate(text, ONE, add_special_tokens=False)
        (added,) = chatty.generate("user: hello", ONE)
        (bare,) = chatty.generate(["user: hello"], ONE, add_special_tokens=False)
    assert once.prompt_token_ids == added.prompt_token_ids == (0, 3, 8)
    assert bare.prompt_token_ids == (3, 8)
    assert once.prompt == text


def test_streams_are_of_one_conversation(chatty, model, tokenizer, small_daemon) -> None:
    (expected,) = chatty.chat(HELLO, ONE)
    several: Any = [HELLO, HELLO]

    async def scenario() -> None:
        async with AsyncLLM(model, tokenizer, address=small_daemon.address) as llm:
            *_, last = [output async for output in llm.chat(HELLO, ONE)]
            assert (last.prompt, last.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
            assert last.outputs == expected.outputs
            for prompt, given in (("<s> user: hello", False), (tokenizer("user: hello"), True)):
                *_, last = [output async for output in llm.generate(prompt, ONE, add_special_tokens=given)]
                assert last.prompt_token_ids == (0, 3, 8)
            with pytest.raises(InvalidArgumentError, match="one conversation"):
                llm.chat(several, ONE)
            with pytest.raises(InvalidArgumentError, match="robots do not speak"):
                await anext(llm.chat([{"role": "robot", "content": ""}], ONE))

    asyncio.run(scenario())


def test_the_command_reads_conversations(model, tokenizer, small_daemon, tmp_path) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def run(lines: list[Any], *options: str) -> Any:
        given = ["--model", str(tmp_path), "--address", small_daemon.address, "--prompts", "-", "--max-tokens", "1"]
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        return CliRunner().invoke(main, ["generate", *given, "--json", *options], input=text)

    tool = {"type": "function", "function": {"name": "f"}}
    done = run(["hello", HELLO, {"messages": HELLO, "tools": [tool], "max_tokens": 2}], "--chat")
    assert done.exit_code == 0, done.output
    outputs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [output["prompt"] for output in outputs] == [
        "<s> user: hello </s> assistant:",
        "<s> user: hello you </s> assistant:",
        "<s> tools: f user: hello you </s> assistant:",
    ]
    assert len(outputs[2]["outputs"][0]["token_ids"]) <= 2
    done = run(["<s> user: hello"], "--no-special-tokens")
    assert json.loads(done.stdout.splitlines()[0])["prompt_token_ids"] == [0, 3, 8]
    for lines, options, said in (
        ([HELLO, [{"role": "user"}]], ["--chat"], "line 2 of the prompts: messages[0].content: must be a text"),
        ([[HELLO, HELLO]], ["--chat"], "line 1 of the prompts: a line has one conversation"),
        ([{"prompt": "hello"}], ["--chat"], 'there is no "messages"'),
        ([{"messages": HELLO}], [], 'there is no "prompt": --chat reads conversations'),
        ([{"messages": HELLO, "top_q": 1}], ["--chat"], "top_q: is not a sampling parameter"),
    ):
        done = run(lines, *options)
        assert done.exit_code != 0
        assert said in done.output
