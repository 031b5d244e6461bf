"""Which snapshot the source returns first, and what it raises if there is none."""

from __future__ import annotations

import asyncio

import pytest

from kvservice.errors import CallTimeoutError, KVServiceError, ObserverUnavailableError
from kvservice.top.source import Source
from kvservice.v1 import inspect_pb2

HANGS = ObserverUnavailableError("the observer does not answer")


class RefusingSource(Source):
    """Its calls raise these errors."""

    def __init__(self, errors: list[KVServiceError]) -> None:
        super().__init__("unix:nowhere")
        self._errors = errors

    async def snapshot(self, *_: object) -> inspect_pb2.Snapshot:
        raise self._errors.pop(0)


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([HANGS, CallTimeoutError("DEADLINE_EXCEEDED: Deadline Exceeded")], "the observer does not answer"),
        ([CallTimeoutError("DEADLINE_EXCEEDED: Deadline Exceeded")], "no answer within 15 s"),
    ],
)
def test_a_source_that_gives_up_says_why(errors: list[KVServiceError], message: str) -> None:
    with pytest.raises(KVServiceError) as raised:
        asyncio.run(RefusingSource(errors).first_snapshot())
    assert str(raised.value) == message
