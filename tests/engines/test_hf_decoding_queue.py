"""Submitted requests of the executor ``hf``: a token at a time, with whatever weights are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlcore

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
PARAMS = [{"n": 2, "seed": 3 + at, "max_tokens": 6 + 4 * at, "ignore_eos": at % 2 == 0} for at in range(4)]


@pytest.fixture(scope="module", params=[{}, {"max_num_seqs": 3}, {"max_num_tokens": 60}], ids=str)
def infer(request: pytest.FixtureRequest, qwen2_folder: Path) -> Iterator[rlcore.InferenceEngine]:
    with rlcore.InferenceEngine(qwen2_folder) as engine:
        yield engine.build(devices="cpu", launcher="inline", dtype="float32", **request.param)


def tokens_of(outputs: Any) -> list[Any]:
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


def collected(infer: rlcore.InferenceEngine, numbers: list[int]) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(numbers):
        found |= infer.collect()
    return [found[number] for number in numbers]


def test_they_are_those_of_generate_and_the_short_ones_end_first(infer: rlcore.InferenceEngine) -> None:
    expected = tokens_of(infer.generate(PROMPTS, PARAMS))
    numbers = infer.submit(PROMPTS, PARAMS)
    first = infer.collect()
    assert numbers[0] in first and numbers[3] not in first, "the longest keeps no other one waiting"
    more = infer.submit(PROMPTS[:1], PARAMS[:1])  # beside what is under way
    rest = collected(infer, [number for number in numbers if number not in first] + more)
    outputs = [*first.values(), *rest]
    assert sorted(tokens_of(outputs)) == sorted([*expected, expected[0]])
    assert infer.collect() == {}


def test_new_weights_come_between_two_tokens_and_what_was_made_stays(
    infer: rlcore.InferenceEngine, qwen2_folder: Path
) -> None:
    expected = tokens_of(infer.generate(PROMPTS, PARAMS))
    numbers = infer.submit(PROMPTS, PARAMS)
    assert infer.collect(timeout_s=0) == {}
    infer.pause("keep")
    assert infer.collect(timeout_s=0) == {}
    old = infer.version
    infer.load(qwen2_folder)  # of the same values, so that the tokens can be compared
    infer.resume()
    outputs = collected(infer, numbers)
    assert tokens_of(outputs) == expected
    spans = [one.version_spans for output in outputs for one in output.outputs]
    for one, completion in zip(spans, [c for output in outputs for c in output.outputs], strict=True):
        assert (one[0].start, one[-1].end) == (0, len(completion.token_ids))
        assert [span.version for span in one] in ([old, old + 1], [old], [old + 1])
    assert [one[0].end for one in spans if len(one) == 2][:1] == [1]


def test_what_is_cancelled_in_the_middle_leaves_the_others_as_they_are(infer: rlcore.InferenceEngine) -> None:
    expected = tokens_of(infer.generate(PROMPTS, PARAMS))
    numbers = infer.submit(PROMPTS, PARAMS)
    assert infer.collect(timeout_s=0) == {}
    assert infer.abort([numbers[1], 10**6]) == 1
    assert tokens_of(collected(infer, [numbers[0], *numbers[2:]])) == [expected[0], *expected[2:]]
    infer.submit(PROMPTS, PARAMS)
    assert infer.collect(timeout_s=0) == {}
    assert infer.abort() == 4 and infer.collect() == {}


def test_requests_whose_cache_was_released_begin_anew(infer: rlcore.InferenceEngine) -> None:
    expected = tokens_of(infer.generate(PROMPTS, PARAMS))
    numbers = infer.submit(PROMPTS, PARAMS)
    assert infer.collect(timeout_s=0) == {}
    infer.meta("kv_cache")
    infer.onload("kv_cache")
    assert tokens_of(collected(infer, numbers)) == expected


def test_pausing_may_wait_for_all_that_is_under_way(infer: rlcore.InferenceEngine) -> None:
    numbers = infer.submit(PROMPTS, PARAMS)
    infer.pause("wait")
    assert sorted(infer.collect(timeout_s=0)) == numbers
    infer.resume()
