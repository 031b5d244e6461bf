"""Which snapshot the source returns first, and what it raises if there is none."""

from __future__ import annotations

import asyncio

import pytest

from kvservice.errors import CallTimeoutError, KVServiceError, ObserverUnavailableError
from kvservice.top import Source
from kvservice.v1 import inspect_pb2

HANGS = ObserverUnavailableError("the observer does not answer")


class RefusingSource(Source):
    """Its calls raise these errors."""

    def __init__(self, errors: list[KVServiceError]) -> None:
        super().__init__("unix:nowhere")
        self._errors = errors

    async def snapshot(self, *_: object) -> inspect_pb2.Snapshot:
        raise self._errors.pop(0)


def test_a_source_that_gives_up_says_why() -> None:
    timeout = CallTimeoutError("DEADLINE_EXCEEDED: Deadline Exceeded")
    given_up: dict[str, list[KVServiceError]] = {
        "the observer does not answer": [HANGS, timeout],
        "no answer within 15 s": [timeout],
    }
    for message, errors in given_up.items():
        with pytest.raises(KVServiceError) as raised:
            asyncio.run(RefusingSource(errors).first_snapshot())
        assert str(raised.value) == message
