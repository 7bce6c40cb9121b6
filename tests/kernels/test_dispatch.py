from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlcore.errors import InvalidInputError, PluginError, UnsupportedError
from rlcore.kernels.dispatch import Query, check_implementation, choose, outranked
from rlcore.ops import token_logprob
from rlcore.registry import OpImplementation, registry

QUERY = Query("cpu", torch.float32, 8, 100)


def here(name: str) -> str:
    return f"{__name__}:{name}"


def add_one(x: int) -> int:
    return x + 1


def refuse_odd_vocabularies(query: Query) -> str | None:
    return f"V = {query.vocab_size} is odd" if query.vocab_size % 2 else None


def implementation(name: str, priority: int, *, device: str = "*", when: str | None = None) -> OpImplementation:
    return OpImplementation("add", device, name, priority, here("add_one"), when and here(when), "test plugin")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = [
        implementation("plain", 0),
        implementation("even", 10, when="refuse_odd_vocabularies"),
        implementation("elsewhere", 20, device="npu"),
    ]
    monkeypatch.setitem(registry().ops, "add", entries)
    choose.cache_clear()
    yield
    choose.cache_clear()


def test_the_highest_priority_that_does_not_refuse_runs_and_the_others_say_why() -> None:
    choice = choose("add", QUERY)
    assert choice.implementation == "even" and choice.fn(1) == 2
    assert choice.refused == (
        ("elsewhere", "it is for device type 'npu', not 'cpu'"),
        ("plain", "priority 0 is below even's 10"),
    )
    odd = choose("add", QUERY._replace(vocab_size=101))
    assert odd.implementation == "plain" and ("even", "V = 101 is odd") in odd.refused


def test_an_implementation_can_be_asked_for_by_name() -> None:
    choice = choose("add", QUERY, "plain")
    assert choice.implementation == "plain"
    assert ("even", "implementation='plain' was asked for") in choice.refused


def test_an_unknown_implementation_raises_with_what_is_registered() -> None:
    with pytest.raises(
        InvalidInputError, match=r"add has no implementation 'fast'; registered: elsewhere .on npu, plugin"
    ):
        choose("add", QUERY, "fast")


def test_an_unknown_operator_raises_with_what_is_registered() -> None:
    with pytest.raises(
        InvalidInputError, match=r"no operator 'subtract'; registered: add, .*linear_logprob, linear_loss"
    ):
        choose("subtract", QUERY)


def test_one_asked_for_by_name_that_refuses_raises_instead_of_falling_back() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"add with implementation='even' for float32 on cpu is not supported: .*even: V = 101 is",
    ):
        choose("add", QUERY._replace(vocab_size=101), "even")
    with pytest.raises(UnsupportedError, match=r"elsewhere: it is for device type 'npu', not 'cpu'"):
        choose("add", QUERY, "elsewhere")


def test_an_implementation_that_cannot_be_imported_names_its_plugin() -> None:
    broken = OpImplementation("add", "*", "broken", 99, "no_such_package.module:fn", None, "acme")
    registry().ops["add"].append(broken)
    with pytest.raises(
        PluginError, match=r"'broken' of add is not at 'no_such_package.module:fn': .*DISABLE_PLUGINS=acme"
    ):
        choose("add", QUERY)


def built_in(name: str, priority: int) -> OpImplementation:
    return OpImplementation("add", "*", name, priority, here("add_one"), None, "kernels")


def takes_nothing() -> int:
    return 1


def raises(query: Query) -> str | None:
    raise SystemExit(f"no licence for {query.vocab_size}")


def answers_yes(query: Query) -> bool:
    return True


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [
        ("raises", "SystemExit: no licence for 100"),
        ("answers_yes", "PluginError: it answered True, which is neither a reason nor None"),
        ("nowhere", "AttributeError: "),
    ],
)
def test_a_plugins_predicate_that_fails_refuses_with_its_plugin(
    predicate: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry().ops["add"].append(implementation("sick", 99, when=predicate))
    choice = choose("add", QUERY)
    assert choice.implementation == "even"
    told = dict(choice.refused)["sick"]
    assert told.startswith(f"its predicate {here(predicate)} of plugin 'test plugin' failed: {reason}")
    assert f"implementation 'sick' of add is left out: {told}" in caplog.text
    with pytest.raises(PluginError, match=r"the predicate .* 'sick' of add failed: .*DISABLE_PLUGINS=test plugin"):
        check_implementation(registry().ops["add"][-1])


def test_a_plugins_implementation_with_other_arguments_names_its_plugin() -> None:
    wrong = OpImplementation("add", "*", "wrong", 99, here("takes_nothing"), None, "acme")
    registry().ops["add"] += [built_in("reference", -1), wrong]
    with pytest.raises(PluginError, match=r"'wrong' of add takes \(\), and is called with \(x\): .*plugin 'acme'"):
        choose("add", QUERY)


def test_what_a_plugin_goes_before_is_known() -> None:
    on_npu, above, below = implementation("on npu", 40, device="npu"), implementation("above", 30), built_in("own", 20)
    registry().ops["add"] += [on_npu, above, below, implementation("lower", 5)]
    assert outranked(on_npu) == outranked(above) == [below]
    assert outranked(registry().ops["add"][-1]) == outranked(below) == []


def test_a_device_specific_implementation_wins_a_tie() -> None:
    registry().ops["add"].append(implementation("for the cpu", 10, device="cpu"))
    assert choose("add", QUERY).implementation == "for the cpu"


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rlcore.kernels.dispatch"):
        for _ in range(3):
            choose("add", QUERY)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "add for float32 on cpu runs as 'even' (refused: " in caplog.text


def test_a_warm_choice_takes_a_few_calls_of_nothing(times_as_long: Any) -> None:
    choose("add", QUERY)
    assert times_as_long(lambda: choose("add", QUERY), lambda: None) < 20


def test_operators_run_what_was_asked_for() -> None:
    logits, targets = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    assert choose("token_logprob", Query("cpu", torch.float32, 0, 3)).implementation == "chunked"
    token_logprob(logits, targets, implementation="reference")
    with pytest.raises(
        InvalidInputError, match=r"token_logprob has no implementation 'triton9000'; registered: .*chunked"
    ):
        token_logprob(logits, targets, implementation="triton9000")
