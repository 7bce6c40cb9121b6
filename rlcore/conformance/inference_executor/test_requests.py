"""Requests that run beside the program: submit, collect, abort, pause and resume."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rlcore.conformance.ends import GONE_S
from rlcore.conformance.promise import promise
from rlcore.errors import StateError

PARAMS = {"max_tokens": 8, "ignore_eos": True, "seed": 3}


def collected(engine: Any, count: int) -> dict[int, Any]:
    """Collect until ``count`` requests have ended; return their outputs."""
    found: dict[int, Any] = {}
    deadline = time.monotonic() + GONE_S
    while len(found) < count:
        new = engine.collect(timeout_s=1.0)
        assert not new.keys() & found.keys(), "a request was given twice"
        found |= new
        assert time.monotonic() < deadline, f"{len(found)} of {count} requests ended within {GONE_S:g} s"
    assert engine.collect(timeout_s=0) == {}, "more than was submitted"
    return found


def tokens(outputs: Any) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@promise("Each submitted request is given once, under its number, and is what generate() gives.", "collect", "submit")
def test_what_is_submitted_is_collected(infer: Any, prompts: Any) -> None:
    expected = infer.generate(prompts, PARAMS | {"n": 2})
    numbers = infer.submit(prompts[:3], PARAMS | {"n": 2})
    numbers += infer.submit(prompts[3:], PARAMS | {"n": 2})
    found = collected(infer, len(prompts))
    assert set(found) == set(numbers)
    ordered = [found[number] for number in numbers]
    assert tokens(ordered) == tokens(expected)
    assert [output.prompt_token_ids for output in ordered] == prompts


@promise("generate() runs while requests are under way, and takes none of them.", "submit", "generate", "collect")
def test_generate_beside_requests(infer: Any, prompts: Any) -> None:
    alone = tokens(infer.generate(prompts[:1], PARAMS))
    infer.pause("keep")
    numbers = infer.submit(prompts, PARAMS)
    infer.resume()
    assert tokens(infer.generate(prompts[:1], PARAMS)) == alone
    assert set(collected(infer, len(prompts))) == set(numbers)


@promise("abort() gives up the requests that it names and no other, and counts those that had not ended.", "abort")
def test_abort_gives_up_what_it_names(infer: Any, prompts: Any) -> None:
    expected = tokens(infer.generate(prompts, PARAMS))
    infer.pause("keep")  # so that none has ended
    numbers = infer.submit(prompts, PARAMS)
    assert infer.abort([numbers[1]]) == 1
    assert infer.abort([numbers[1]]) == 0, "it was given up already"
    assert infer.abort([]) == 0
    infer.resume()
    found = collected(infer, len(prompts) - 1)
    kept = [place for place, number in enumerate(numbers) if number in found]
    assert kept == [0, 2, 3], "another one was lost"
    assert tokens(found[numbers[place]] for place in kept) == [expected[place] for place in kept]


@promise("abort() also gives up what has ended and was not collected, and does not count it.", "abort")
def test_abort_gives_up_what_has_ended(infer: Any, prompts: Any) -> None:
    first, second = infer.submit(prompts[:2], PARAMS)
    infer.pause("wait")
    assert infer.abort([first]) == 0, "it had ended"
    infer.resume()
    assert set(collected(infer, 1)) == {second}, "what was given up was collected"


@promise("abort() without numbers gives up all, and the engine goes on.", "abort")
def test_abort_of_all_leaves_nothing(infer: Any, prompts: Any) -> None:
    infer.pause("keep")
    infer.submit(prompts, PARAMS)
    assert infer.abort() == len(prompts)
    infer.resume()
    assert infer.collect(timeout_s=0.2) == {}
    (number,) = infer.submit(prompts[:1], PARAMS)
    assert set(collected(infer, 1)) == {number}


@promise("No step is made between pause('keep') and resume(); what was under way goes on then.", "pause", "resume")
def test_nothing_ends_while_paused(infer: Any, prompts: Any) -> None:
    expected = tokens(infer.generate(prompts, PARAMS))
    infer.pause("keep")
    numbers = infer.submit(prompts, PARAMS)
    assert infer.collect(timeout_s=0.3) == {}, "requests ended while the executor was paused"
    with pytest.raises(StateError, match=r"would wait for ever while the engine is paused; call resume\(\)"):
        infer.collect()
    infer.resume()
    found = collected(infer, len(prompts))
    assert tokens(found[number] for number in numbers) == expected


@promise("pause('wait') lets what is under way end first; pause('abort') gives it up.", "pause", "resume")
def test_pause_waits_or_aborts(infer: Any, prompts: Any) -> None:
    numbers = infer.submit(prompts, PARAMS)
    infer.pause("wait")
    assert set(infer.collect(timeout_s=1.0)) == set(numbers), "requests were left when pause('wait') had returned"
    infer.resume()
    infer.submit(prompts, PARAMS)
    infer.pause("abort")
    infer.resume()
    assert infer.collect(timeout_s=0.3) == {}, "requests went on after pause('abort')"


@promise("resume() without a pause does nothing.", "resume")
def test_resume_without_a_pause(infer: Any, prompts: Any) -> None:
    infer.resume()
    assert len(infer.generate(prompts, PARAMS)) == len(prompts)
