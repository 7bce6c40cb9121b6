"""The quickstart case: what it reads from a run, which runs it refuses. Real runs are in bench/results."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlcore.bench.case import load_cases
from rlcore.bench.cases import quickstart as case
from rlcore.bench.measurement.measure import run_case
from rlcore.quickstart.output import PHASES
from rlcore.registry import get_device

BEFORE, AFTER = 0.30, 0.99


def a_run(before: float = BEFORE, after: float = AFTER) -> case.QuickstartRun:
    steps: case.Steps = [{"step": 0, "imitation_steps": 70, "accuracy": before}]
    for step in range(1, case.STEPS + 1):
        seconds = {"generate_s": 0.5, "train_s": 0.2, "sync_s": 0.01, "offload_s": 0.02}
        steps.append({"step": step, "parity": 1e-7 * step, "tokens_per_s": 1000 + step, **seconds})
    steps[50]["accuracy"] = 0.5
    steps[-1]["accuracy"] = after
    return case.QuickstartRun(steps, processor_s=77.0)


def test_quantities_are_those_of_the_whole_run() -> None:
    found = case.quantities(a_run())
    assert {name: quantity.unit for name, quantity in found.items() if quantity.unit != "s"} == {
        "accuracy_before": "1",
        "accuracy_after": "1",
        "imitation_steps": "step",
        "parity_max": "nat",
        "generated_tokens_per_s": "token/s",
    }
    assert {name: round(quantity.value, 9) for name, quantity in found.items()} == {
        "processor": 77,
        "accuracy_before": BEFORE,
        "accuracy_after": AFTER,
        "imitation_steps": 70,
        "parity_max": 1e-5,
        "generated_tokens_per_s": 1050.5,
        "generate": 50,
        "train": 20,
        "sync": 1,
        "offload": 2,
    }


def test_phases_are_the_quickstarts() -> None:
    assert case.PHASES == PHASES  # the case stands below the quickstart and cannot import it


def test_run_that_learned_passes_and_is_no_control() -> None:
    case.check_learned(a_run())
    with pytest.raises(AssertionError, match=r"^the control went from 30\.0% to 99\.0%$"):
        case.check_learned_nothing(a_run())


def test_run_that_did_not_learn_is_refused_and_is_a_control() -> None:
    case.check_learned_nothing(a_run(after=0.34))
    with pytest.raises(AssertionError, match=r"^held-out accuracy is 89\.9%, less than 98%$"):
        case.check_learned(a_run(after=0.899))


@pytest.mark.parametrize("check", [case.check_learned, case.check_learned_nothing])
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda steps: steps.pop(17), "^steps are missing$"),
        (lambda steps: steps[40].update(parity=6e-4), r"differ by 6\.00e-04$"),
        (lambda steps: [one.update(parity=0.0) for one in steps], r"differ by 0\.00e\+00$"),
        (lambda steps: steps[40].update(parity=float("inf")), "differ by inf$"),
    ],
)
def test_run_with_steps_or_parity_amiss_is_refused(
    check: Callable[[case.QuickstartRun], None], break_it: Callable[[case.Steps], object], message: str
) -> None:
    run = a_run(after=AFTER if check is case.check_learned else BEFORE)
    check(run)
    break_it(run.steps)
    with pytest.raises(AssertionError, match=message):
        check(run)


def test_learning_is_sampled_once_a_seed_and_the_control_once() -> None:
    device = get_device("cpu")
    learns, control = (load_cases()[f"quickstart/{name}"].prepare(device) for name in ("learns", "control"))
    assert (learns.num_runs, learns.params) == (5, {"steps": 100, "seeds": "0,1,2,3,4"})
    assert (control.num_runs, control.params) == (1, {"steps": 100, "seeds": "0"})


def test_quickstart_that_fails_is_the_result_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_LOG_LEVEL", "LOUD")  # refused by the new process, before any training
    (result,) = run_case(load_cases()["quickstart/control"], get_device("cpu"))
    assert result.status == "fail"
    assert result.reason.startswith("RuntimeError: rlcore quickstart --seed 0 ended with exit code 1: ")
    assert "RLCORE_LOG_LEVEL must be one of" in result.reason
