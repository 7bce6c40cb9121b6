"""Requests go to the replica that has least to do, and come back whole, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.inference import InferenceEngine
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.request_router import RequestRouter, spread
from rlcore.errors import InvalidInputError, StateError

REFUSED, UNSENT = 99, 98
"""A prompt that no replica takes, and one with which a replica fails as it begins."""


class Replica:
    """Ends what it has when it is asked, but for ``slow`` prompts."""

    def __init__(self) -> None:
        self.waiting: dict[int, Any] = {}
        self.slow: set[int] = set()

    def check_prompts(self, prompts: Any, params: Any, *, numbers: Sequence[int]) -> None:
        for number, prompt in zip(numbers, prompts, strict=True):
            if REFUSED in list(prompt):
                raise InvalidInputError(f"prompt {number} is refused")

    def submit(self, numbers: Any, prompts: Any, params: Any, *, version: int) -> None:
        self.waiting |= zip(numbers, prompts, strict=True)
        if any(UNSENT in list(prompt) for prompt in prompts):
            raise StateError("the replica is held")

    def collect(self, timeout_s: float, *, version: int) -> dict[int, Any]:
        ended = {number: prompt for number, prompt in self.waiting.items() if not self.slow.intersection(prompt)}
        for number in ended:
            del self.waiting[number]
        return ended

    def abort(self, numbers: Any) -> int:
        chosen = [number for number in self.waiting if numbers is None or number in numbers]
        for number in chosen:
            del self.waiting[number]
        return len(chosen)

    def pause(self, mode: str, *, version: int) -> None:
        pass


class TwoReplicas(InferenceEngine):
    """An engine whose workers are ``replicas``."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = replicas or (Replica(), Replica())
        self._group: Any = SimpleNamespace(workers=self.replicas, call=self._call_each)
        self._router = RequestRouter(self._group)
        self._version = 0

    def _require_ready(self, purpose: str) -> None:
        pass

    def _call_each(self, method: str, calls: Any, on_event: Any = None, is_enough: Any = None) -> list[Any]:
        self.is_enough = is_enough
        each = zip(self.replicas, calls, strict=True)
        return [getattr(replica, method)(*args, **kwargs) for replica, (args, kwargs) in each]

    @property
    def under_way(self) -> list[list[int]]:
        return [sorted(replica.waiting) for replica in self.replicas]


@pytest.fixture
def engine() -> Any:
    return TwoReplicas()


def of(*most: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=one) for one in most]


@pytest.mark.parametrize(
    ("costs", "loads", "ranks"),
    [([1, 1, 9, 1], [0, 0], [1, 1, 0, 1]), ([2, 2], [5, 0], [1, 1]), ([4, 3, 3], [0, 0, 1], [0, 1, 2])],
)
def test_the_costliest_is_placed_first_and_where_least_is_to_do(
    costs: list[int], loads: list[int], ranks: list[int]
) -> None:
    assert spread(costs, loads) == ranks


def test_what_is_under_way_counts_until_it_has_ended(engine: Any) -> None:
    engine.submit([[1], [2]], of(500, 10))
    engine.submit([[3], [4]], of(100, 100))
    assert engine.under_way == [[0], [1, 2, 3]]
    assert engine.collect() == {0: [1], 1: [2], 2: [3], 3: [4]}
    engine.submit([[5], [6]], of(10, 10))
    assert engine.under_way == [[4], [5]], "nobody has anything left of before"


@pytest.mark.parametrize("max_in_flight", [1, 1024])
def test_with_a_prompt_that_is_refused_none_begins(engine: Any, max_in_flight: int) -> None:
    before = engine.submit([[7]])
    with pytest.raises(InvalidInputError, match=r"^prompt 2 is refused$"):
        engine.submit([[1], [2], [3, REFUSED]], max_in_flight=max_in_flight)
    assert list(engine.collect()) == before
    assert engine.under_way == [[], []]


def test_a_submit_that_fails_midway_leaves_nothing(engine: Any) -> None:
    engine.replicas[0].slow = engine.replicas[1].slow = {7}
    before = engine.submit([[7]])
    with pytest.raises(StateError, match="the replica is held"):
        engine.submit([[1], [2], [UNSENT]], max_in_flight=2)
    assert sorted(number for own in engine.under_way for number in own) == before
    assert engine.collect(timeout_s=0) == {}, "what had ended while the rest waited for room is dropped too"


def test_a_submit_that_needs_room_of_a_paused_engine_leaves_nothing(engine: Any) -> None:
    before = engine.submit([[7]])
    engine.pause("keep")
    with pytest.raises(StateError, match=r"submit\(\) needs room for 1 prompts, and the engine is paused; resume\(\)"):
        engine.submit([[1], [2]], max_in_flight=2)
    assert sorted(number for own in engine.under_way for number in own) == before


def test_arguments_of_another_kind_are_refused(engine: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"abort\(\) takes a list of numbers that submit\(\) gave, or None as numbers"
    ):
        engine.abort(3)
    for timeout_s in ("a", -1, float("nan")):
        with pytest.raises(
            InvalidInputError, match=r"collect\(\) takes a finite number of at least 0, or None as timeout_s"
        ):
            engine.collect(timeout_s)


def test_what_was_aborted_is_never_collected(engine: Any) -> None:
    first, second, third = engine.submit([[1], [2], [3]], max_in_flight=1)
    assert engine.abort([first, third]) == 1, "the first has ended, and was not collected"
    assert list(engine.collect()) == [second]


def test_the_first_replica_that_has_something_ends_the_wait_for_the_others(engine: Any) -> None:
    engine.replicas[0].slow = engine.replicas[1].slow = {7}
    first, _ = engine.submit([[1], [7]])
    assert engine.collect() == {first: [1]}
    assert [engine.is_enough(answer) for answer in ({first: [1]}, {})] == [True, False]


def test_turns_leave_what_the_program_submitted_to_it(engine: Any) -> None:
    (own,) = engine.submit([[7]])
    asked: list[tuple[int, list[Any]]] = []

    def next_prompt(index: int, outputs: list[Any]) -> list[int] | None:
        asked.append((index, list(outputs)))
        return [10 * index] if len(outputs) < 2 else None

    assert engine.generate_turns([[1], [2]], next_prompt) == [[[1], [0]], [[2], [10]]]
    assert sorted(asked) == [(0, [[1]]), (0, [[1], [0]]), (1, [[2]]), (1, [[2], [10]])]
    assert engine.collect() == {own: [7]}
    assert engine.collect() == {}


def test_turns_take_prompts_as_submit_does(engine: Any) -> None:
    assert engine.generate_turns("12", lambda index, outputs: None) == [["12"]], "a text is one prompt"
    with pytest.raises(InvalidInputError, match="prompts must be a text or a list of texts"):
        engine.generate_turns(3, lambda index, outputs: None)
    with pytest.raises(InvalidInputError, match="prompt 0 must be a text or a list of token ids, got 1"):
        engine.generate_turns([1, 2], lambda index, outputs: None)


def test_a_failure_in_a_turn_gives_up_the_conversations_alone(engine: Any) -> None:
    engine.replicas[0].slow = engine.replicas[1].slow = {2, 7}
    own = engine.submit([[6], [7], [8], [9]])
    with pytest.raises(ZeroDivisionError):
        engine.generate_turns([[1], [2]], lambda index, outputs: 1 // 0)
    assert [number for waiting in engine.under_way for number in waiting] == [own[1]]
    assert engine.collect() == {own[0]: [6], own[2]: [8], own[3]: [9]}


class TokenizingReplica(Replica):
    """Gives the token ids of the prompts that it checks, and counts the texts that it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenized: list[str] = []

    def check_prompts(self, prompts: Any, params: Any, *, numbers: Sequence[int]) -> Any:
        return [self._token_ids(prompt) for prompt in prompts]

    def submit(self, numbers: Any, prompts: Any, params: Any, *, version: int) -> None:
        self.waiting |= zip(numbers, self.generate(prompts, params, version=version), strict=True)

    def generate(self, prompts: Any, params: Any, *, version: int) -> list[RequestOutput]:
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return [RequestOutput(text, self._token_ids(prompt), []) for text, prompt in zip(texts, prompts, strict=True)]

    def collect(self, timeout_s: float, *, version: int) -> dict[int, Any]:
        ended, self.waiting = self.waiting, {}
        return ended

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            self.tokenized.append(prompt)
            return [ord(character) for character in prompt]
        return list(prompt)


@pytest.mark.parametrize("call", ["generate", "submit"])
def test_each_text_is_tokenised_by_one_replica_once(call: str) -> None:
    engine: Any = TwoReplicas(TokenizingReplica(), TokenizingReplica())
    prompts = ["ab", [7, 8], "c", "ab"]
    if call == "generate":
        outputs = engine.generate(prompts, {"max_tokens": 4}, progress=False)
    else:
        numbers = engine.submit(prompts)
        found = engine.collect()
        outputs = [found[number] for number in numbers]
    assert [output.prompt for output in outputs] == ["ab", None, "c", "ab"]
    assert [output.prompt_token_ids for output in outputs] == [[97, 98], [7, 8], [99], [97, 98]]
    assert sorted(text for replica in engine.replicas for text in replica.tokenized) == ["ab", "ab", "c"]
    assert engine._router._prompts == {}, "no text is kept of what has ended"
