"""The registered cases: they load, pass, and their checks refuse a wrong result."""

from __future__ import annotations

import dataclasses
import importlib
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from once import ONCE, run_once

from rlcore.bench import plugin
from rlcore.bench.case import Case, Work, load_cases, select_cases
from rlcore.bench.cases import attention, dispatch, kernel_inputs, kernel_scans, kernels, workers
from rlcore.bench.measurement.measure import run_case
from rlcore.errors import BenchError
from rlcore.registry import get_device, registry
from tests.accuracy import rounding

# on a host: at an accelerator's size they are for an accelerator's time
HEADS = [
    "kernels/linear_logprob/8b",
    "kernels/linear_logprob_accuracy",
    "kernels/linear_logprob_forward/8b",
    "kernels/linear_loss/8b",
    "kernels/linear_loss_sequences/8b",
    "kernels/token_logprob",
    "kernels/token_logprob_forward",
]
SCANS = ["kernels/discounted_return", "kernels/gae", "kernels/group_advantage", "kernels/token_loss"]
CHECKED = [name for name in (*HEADS, *SCANS) if name != "kernels/linear_loss_sequences/8b"]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    # More rows than are checked at a time, and a last slice that is not full.
    monkeypatch.setattr(kernel_inputs, "HOST", kernel_inputs.HeadSize(300, 501, 32, torch.float32))
    monkeypatch.setattr(kernel_scans, "_HOST_TOKENS", 4096)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", [*HEADS, *SCANS])
def test_kernel_case_measures_every_implementation(name: str) -> None:
    results = run_once(name)
    measured = [result for result in results if result.status != "blocked"]  # what this device cannot run
    assert [(result.status, result.reason) for result in measured] == [("pass", "")] * len(measured)
    found = {result.implementation for result in measured}
    if name in SCANS:
        assert "copy" in found and len(found) >= 2
    elif "sequences" in name:
        assert found == {"grpo", "gspo", "gmpo", "sequence-masked tis"}
    else:
        assert found >= {"reference", "chunked"}
        assert all(result.params["T"] == 300 for result in measured)


@pytest.mark.usefixtures("_small")
def test_the_accuracy_case_records_errors_of_everything() -> None:
    results = run_once("kernels/linear_logprob_accuracy")
    found = next(result for result in results if result.implementation == "chunked")
    errors = {metric.name: metric.samples[-1] for metric in found.metrics if metric.name.endswith("_error")}
    names = ("logprob", "peaked_logprob", "entropy", "hidden_gradient", "weight_gradient")
    assert errors.keys() == {f"{name}_error" for name in names}
    T, V, H = kernel_inputs.HOST.T, kernel_inputs.HOST.V, kernel_inputs.HOST.H
    # A log-prob is a logit less a logarithm of a sum; logits are of unit scale, or up to 80. What is relative is less.
    largest = {"peaked_logprob_error": 2 * 80.0}
    for name, error in errors.items():
        assert 0 < error < largest.get(name, 2 * (6 + math.log(V))) * rounding(T + V + H), name


@pytest.mark.parametrize("head", ["0.5b", "14b", "1.7b"])
def test_other_sizes_are_blocked_on_a_host(head: str) -> None:
    (result,) = run_once(f"kernels/linear_loss/{head}")
    assert result.status == "blocked" and "it is for accelerators" in result.reason


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", CHECKED)
def test_kernel_case_refuses_a_wrong_result(name: str) -> None:
    work: Work = load_cases()[name].prepare(get_device("cpu"))
    only = next((one for one in work.contenders if one.implementation == "reference"), work.contenders[0])
    output = only.run()
    only.check(output)
    parts = (output,) if isinstance(output, torch.Tensor) else output
    num_checked = 2 if name in {"kernels/linear_logprob_accuracy", "kernels/linear_logprob/8b"} else len(parts)
    for position, part in enumerate(parts[:num_checked]):
        wrong = part + 0.02 * part.abs().max()
        changed = (*parts[:position], wrong, *parts[position + 1 :])
        with pytest.raises(AssertionError, match=" is wrong: "):
            only.check(wrong if isinstance(output, torch.Tensor) else changed)


@pytest.mark.parametrize(
    "name", [pytest.param("packed_attention/even", marks=pytest.mark.slow), "packed_attention/uneven"]
)
def test_packed_attention_is_measured_beside_padding_and_a_leak_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    small = dataclasses.replace(attention._HOST_LAYERS, T=128, longest=64, shortest=16)
    monkeypatch.setattr(attention, "_HOST_LAYERS", small)
    results = run_once(name)
    assert [(result.implementation, result.status) for result in results] == [
        ("per_sequence", "pass"),
        ("padded", "pass"),
    ]
    packed = load_cases()[name].prepare(get_device("cpu")).contenders[0]
    hidden_TH, *gradients = packed.run()
    with pytest.raises(AssertionError, match="packed differs from padded by"):
        packed.check((hidden_TH.roll(1, 0), *gradients))


@pytest.mark.parametrize(
    "name", ["dispatch/device", "dispatch/op", "dispatch/op_new", "startup/import", "startup/help"]
)
def test_host_case_passes(name: str) -> None:
    results = run_once(name)
    assert {(result.status, result.reason) for result in results} == {("pass", "")}


def test_a_device_is_looked_up_by_name_and_without_one() -> None:
    named, default = load_cases()["dispatch/device"].prepare(get_device("cpu")).contenders
    assert (named.implementation, default.implementation) == ("registry", "registry, default")
    assert named.run() is get_device("cpu") and default.run() is get_device()
    with pytest.raises(AssertionError, match=r"^got 'other' instead of "):
        default.check("other")


@pytest.mark.parametrize(("name", "is_new"), [("dispatch/op", False), ("dispatch/op_new", True)])
def test_an_operator_is_chosen_anew_only_for_a_new_query(name: str, is_new: bool) -> None:
    (contender,) = load_cases()[name].prepare(get_device("cpu")).contenders
    first, second = contender.run(), contender.run()
    contender.check(second)
    assert (first is not second) == is_new


def test_startup_case_fails_when_the_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    (result,) = run_once("startup/import")
    assert result.status == "fail"
    assert "returned non-zero exit status" in result.reason


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "RAY_ADDRESS is not set; start a Ray cluster of two hosts"),
        ("10.0.0.1:6379", "the Ray cluster at 10.0.0.1:6379 has this one, 10.0.0.1, alone"),
    ],
)
@pytest.mark.parametrize("name", ["call", "send", "receive", "start_4"])
def test_another_host_is_asked_for_where_there_is_none(
    name: str, address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = types.SimpleNamespace(hosts=lambda: [types.SimpleNamespace(name="host-a", address="10.0.0.1")])
    monkeypatch.setattr(workers, "connect", lambda at: cluster)
    monkeypatch.setenv("RAY_ADDRESS", address)
    util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(util=util))
    (result,) = run_once(f"workers/ray_other_host_{name}")
    assert result.status == "blocked" and reason in result.reason


FAKE = 'raise SystemExit("found through sys.path alone")\n'


@pytest.mark.parametrize("name", ["startup/import", "startup/help", "quickstart/control", "workers/start_1"])
def test_child_of_a_case_finds_modules_through_sys_path_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder stands before that of the installed packages, which a child finds by itself."""
    for module in ("rlcore", "torch"):
        (tmp_path / f"{module}.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    started: list[str] = []

    def read(command: list[str], **options: Any) -> Any:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        started.append(done.stderr.strip())
        raise InterruptedError

    fake = types.SimpleNamespace(run=read, Popen=read, PIPE=subprocess.PIPE)
    monkeypatch.setattr(importlib.import_module(f"rlcore.bench.cases.{name.partition('/')[0]}"), "subprocess", fake)
    run_once(name)
    assert started == ["found through sys.path alone"]


# ------------------------------------------------------------------------------------------------- selection


def test_no_name_means_all_and_a_folder_means_all_in_it() -> None:
    assert [case.name for case in select_cases([])] == sorted(load_cases())
    heads = {f"kernels/{case}/{head}" for case in ("linear_loss", "linear_logprob") for head in kernel_inputs.HEADS}
    assert {case.name for case in select_cases(["kernels"])} >= {*HEADS, *SCANS, *heads}
    losses = {f"kernels/linear_loss/{size}" for size in (*kernel_inputs.HEADS, "small_vocabulary", "long")}
    assert {case.name for case in select_cases(["kernels/linear_loss"])} == losses
    dispatch = [name for name in load_cases() if name.startswith("dispatch/")]
    assert {"dispatch/device", "dispatch/op", "dispatch/op_new"} <= {*dispatch}
    chosen = select_cases(["startup/help", "dispatch", "dispatch/op"])
    assert [case.name for case in chosen] == ["startup/help", *dispatch]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("kernel", "did you mean kernels"),
        ("dispatch/ops", "did you mean dispatch/op or "),
        ("speed of light", "there are folders attention, collectives, copies, "),
        ("", "there are folders attention, "),
    ],
)
def test_unknown_case_is_told_what_is_close(name: str, hint: str) -> None:
    with pytest.raises(BenchError) as refused:
        select_cases([name])
    assert str(refused.value).startswith(f"no benchmark case {name!r}; {hint}")


no_name = Case(name="my case", description="", prepare=lambda device: Work(contenders=(), params={}))
same_name = Case(name="dispatch/op", description="", prepare=lambda device: Work(contenders=(), params={}))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.at_all:case", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (
            "rlcore.bench.case:nothing",
            "cannot be imported: AttributeError: module 'rlcore.bench.case'",
        ),
        ("rlcore.bench.case:load_cases", "is no bench.case.Case: <function load_cases"),
        ("rlcore.bench.cases.dispatch.again:cases", "cannot be imported: ModuleNotFoundError: "),
        ("rlcore.bench.cases.dispatch:again", "repeats the name 'dispatch/op'"),
        ("rlcore.bench.cases.dispatch:spaced", "has the name 'my case'; a name is words with slashes between"),
    ],
)
def test_case_that_cannot_be_had_fails_and_the_others_are_there(
    monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.setattr(dispatch, "again", same_name, raising=False)
    monkeypatch.setattr(dispatch, "spaced", no_name, raising=False)
    monkeypatch.setitem(registry().benchmarks, path, "acme")
    cases = load_cases()
    assert "dispatch/op" in cases and cases[path].effort == "quick"  # it is in every run, for somebody counts on it
    (result,) = run_case(cases[path], get_device("cpu"))
    told = f"benchmark case {path!r} of plugin 'acme' {message}"
    assert result.status == "fail" and result.reason.startswith(f"BenchError: {told}")
    monkeypatch.setenv("RLCORE_STRICT_PLUGINS", "1")
    with pytest.raises(BenchError) as refused:
        load_cases()
    assert str(refused.value).startswith(told)


def test_the_wheel_has_every_case_but_those_beside_other_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the list of packages that setuptools makes of pyproject.toml."""
    from setuptools.config.pyprojecttoml import read_configuration

    root = Path(__file__).resolve().parents[2]
    packages = read_configuration(root / "pyproject.toml")["tool"]["setuptools"]["packages"]
    ours = {name.removeprefix("rlcore.bench") for name in packages if name.startswith("rlcore.bench")}
    assert ours == {"", ".cases", ".measurement", ".reports"}
    outside = {path.stem for path in (root / "bench/cases").iterdir() if path.is_dir() and path.stem != "__pycache__"}
    assert outside == {"peers"}
    monkeypatch.setattr(plugin, "PEERS", tmp_path / "peers")
    registered: list[str] = []
    plugin.rlcore_register_benchmarks(registered.append)
    assert [path for path in registered if "peers" in path] == []
    with monkeypatch.context() as without:
        without.setattr(registry(), "benchmarks", dict.fromkeys(registered, "bench"))
        found = load_cases()
    assert "weight_sync/vllm/7b" not in found
    for name in ("kernels/peers", "race", "weight_sync/sglang", "weight_sync/vllm", "weight_sync/vllm_float8"):
        assert "a clone of the repository" in found[name].description
        (result,) = run_case(found[name], get_device("cpu"), ONCE)
        assert result.status == "blocked" and "pip install -e . in it" in result.reason


@pytest.mark.parametrize("op", ["token_logprob", "linear_logprob"])
def test_operators_of_other_libraries_take_part_in_a_checkout_alone(
    op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device: Any = Fake(dataclasses.replace(get_device("cpu").spec, is_host=False))
    ours = set(kernel_inputs.implementations(op, device))
    others = kernels._scorers(op, device, print).keys() - ours
    assert any(name.startswith("trl") for name in others) and any(name.startswith("torch.compile") for name in others)
    monkeypatch.setattr(kernels, "PEERS", tmp_path / "peers")
    assert kernels._scorers(op, device, print).keys() == ours


class Fake(NamedTuple):
    """FAKE: what the choice of contenders asks of an accelerator."""

    spec: Any
    type: str = "cpu"
