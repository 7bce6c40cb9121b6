"""The requests of an executor that generates only while it is called."""

from __future__ import annotations

from typing import Any

from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.request_queue import RequestQueue


def test_what_has_ended_is_given_up_too_and_is_not_counted() -> None:
    queue = RequestQueue(lambda prompts, params, version: [*prompts])  # type: ignore[list-item]
    prompts: list[Any] = [[1], [2], [3]]
    queue.submit([0, 1, 2], prompts, [SamplingParams()] * 3)
    queue.pause("wait", version=0)
    assert queue.abort([0]) == 0
    assert queue.collect(version=0) == {1: [2], 2: [3]}
    queue.submit([3], prompts[:1], [SamplingParams()])
    queue.resume()
    queue.pause("wait", version=0)
    assert queue.abort(None) == 0
    assert queue.collect(version=0) == {}
