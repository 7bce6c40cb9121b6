"""The registered cases: they load, pass, and their checks refuse a wrong result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.bench.case import Case, Work, load_cases, select_cases
from rlcore.bench.cases import kernels
from rlcore.bench.runner import Sampling, run_case
from rlcore.errors import BenchError
from rlcore.registry import get_device, registry

ONCE = Sampling(min_samples=1, max_samples=1, max_warmup=1)
KERNELS = ["kernels/linear_logprob", "kernels/linear_loss", "kernels/token_logprob"]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    # More rows than are checked at a time, and a last slice that is not full.
    monkeypatch.setattr(kernels, "_HOST", kernels._Size(300, 501, 32, torch.float32))
    monkeypatch.setattr(kernels, "_ACCELERATOR", kernels._Size(300, 501, 32, torch.bfloat16))
    monkeypatch.setattr(kernels, "_ACCELERATOR_LOGITS", kernels._Size(300, 501, 32, torch.bfloat16))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_case_measures_every_implementation(device: Any, name: str) -> None:
    results = run_case(load_cases()[name], device, ONCE)
    measured = [result for result in results if result.status != "blocked"]  # what this device cannot run
    assert {result.implementation for result in measured} >= {"reference", "chunked"}
    assert [(result.status, result.reason) for result in measured] == [("pass", "")] * len(measured)
    assert all(result.params["T"] == 300 and result.bytes for result in measured)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_case_refuses_a_wrong_result(device: Any, name: str) -> None:
    work: Work = load_cases()[name].prepare(device)
    only = work.contenders[0]
    output = only.run()
    only.check(output)
    parts = (output,) if isinstance(output, torch.Tensor) else output
    for position, part in enumerate(parts):
        wrong = part + 0.02 * part.abs().max()
        changed = (*parts[:position], wrong, *parts[position + 1 :])
        with pytest.raises(AssertionError, match=" is wrong: "):
            only.check(wrong if isinstance(output, torch.Tensor) else changed)


@pytest.mark.parametrize("name", ["dispatch/device", "dispatch/op", "startup/import", "startup/help"])
def test_host_case_passes(name: str) -> None:
    (result,) = run_case(load_cases()[name], get_device("cpu"), ONCE)
    assert (result.status, result.reason) == ("pass", "")


def test_startup_case_fails_when_the_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    (result,) = run_case(load_cases()["startup/import"], get_device("cpu"), ONCE)
    assert result.status == "fail"
    assert "returned non-zero exit status" in result.reason


# ------------------------------------------------------------------------------------------------- selection


def test_no_name_means_all_and_a_folder_means_all_in_it() -> None:
    assert [case.name for case in select_cases([])] == sorted(load_cases())
    assert [case.name for case in select_cases(["kernels"])] == KERNELS
    assert [case.name for case in select_cases(["startup/help", "dispatch", "dispatch/op"])] == [
        "startup/help",
        "dispatch/device",
        "dispatch/op",
    ]


@pytest.mark.parametrize("name", ["kernel", "kernels/", "kernels/linear", ""])
def test_unknown_case_lists_the_known_ones(name: str) -> None:
    with pytest.raises(BenchError, match=rf"^no benchmark case '{name}'; registered: dispatch/device, "):
        select_cases([name])


same_name = Case(name="dispatch/op", description="", prepare=lambda device: Work(contenders=(), params={}))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.at_all:case", "of plugin 'acme' cannot be imported: No module named 'nowhere'"),
        (
            "rlcore.bench.case:nothing",
            "of plugin 'acme' cannot be imported: module 'rlcore.bench.case' has no attribute",
        ),
        ("rlcore.bench.case:load_cases", r"of plugin 'acme' is no bench\.case\.Case: <function load_cases"),
        ("rlcore.bench.cases.dispatch.again:op_choice_case", "of plugin 'acme' cannot be imported"),
    ],
)
def test_case_that_cannot_be_had_names_its_plugin(monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.setitem(registry().benchmarks, path, "acme")
    with pytest.raises(BenchError, match=rf"^benchmark case '{path}' {message}"):
        load_cases()


def test_two_cases_cannot_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore.bench.cases import dispatch

    monkeypatch.setattr(dispatch, "again", same_name, raising=False)
    monkeypatch.setitem(registry().benchmarks, "rlcore.bench.cases.dispatch:again", "acme")
    with pytest.raises(BenchError, match=r"of plugin 'acme' repeats the name 'dispatch/op'$"):
        load_cases()
