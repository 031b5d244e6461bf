"""Engines over models of the Hugging Face library, with their K/V in the daemon.

llm = LLM("/path/of/a/model")                            starts a private daemon; address= uses another one
outputs = llm.generate(["A prompt", "Another"], SamplingParams(max_tokens=32))
print(outputs[0].outputs[0].text)

An engine with a loop of its own computes the steps of a session with ModelRunner.
"""

from kvservice.engines.aio import AsyncLLM
from kvservice.engines.llm import LLM
from kvservice.engines.params import CompletionOutput, RequestOutput, SamplingParams, TokenLogprob
from kvservice.engines.runner import ModelRunner
from kvservice.engines.speculation import DraftModel, PromptLookup

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "DraftModel",
    "ModelRunner",
    "PromptLookup",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
]
