"""The examples run, do what they say, and stand in their guides as they are."""

from __future__ import annotations

import os
import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rlcore
from rlcore.bench.case import load_cases
from rlcore.bench.cases import kernel_inputs
from rlcore.bench.measurement.measure import Sampling, run_case
from rlcore.bench.measurement.system import new_record
from rlcore.bench.run import BenchRun
from rlcore.cli import main as cli
from rlcore.registry import get_device
from tests.model_rounding import logprob_rounding
from tests.warm import ENGINES, run_warm

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = (
    "addition.py",
    "areal_grpo.py",
    "async_grpo.py",
    "count_squares.py",
    "lightrft_grpo.py",
    "more_devices.py",
    "reward_model.py",
    "rlite_tutorial.py",
    "sampler_parity.py",
    "tinker_grpo.py",
)  # docs/clusters.md, docs/images.md, docs/migrating.md, docs/rollout.md, docs/train.md, docs/vllm.md
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in ELSEWHERE)

Run = Callable[..., list[str]]


@pytest.fixture
def run_example(tmp_path: Path) -> Run:
    def run(name: str, *arguments: str) -> list[str]:
        settings = {"RLCORE_CACHE": str(tmp_path / "cache"), "RLCORE_DEVICE": "cpu"}
        result = run_warm([str(ROOT / "examples" / name), *arguments], env=settings, cwd=tmp_path, modules=ENGINES)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_guide_shows_the_example_as_it_is(path: Path) -> None:
    page = (ROOT / "docs" / "guides" / f"{path.stem}.md").read_text()
    assert re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) == [path.read_text()]


def test_the_package_gives_every_example_and_replaces_none_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "examples"
    found = CliRunner().invoke(cli.app, ["examples", str(folder)])
    sources = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".yaml"))
    names = [source.relative_to(ROOT / "examples") for source in sources]
    assert Path("algorithms", "grpo.py") in names
    assert found.stdout.splitlines() == [str(folder / name) for name in names]
    assert sorted(file for file in folder.rglob("*") if file.is_file()) == [folder / name for name in names]
    assert [(folder / name).read_bytes() for name in names] == [source.read_bytes() for source in sources]
    (folder / "framework_author.py").unlink()
    (folder / "researcher.py").write_text("my changes")
    refused = CliRunner().invoke(cli.app, ["examples", str(folder)])
    told = f"{folder / names[0]} exists; give another folder, or --force to replace the examples in it"
    assert str(refused.exception) == told
    assert (folder / "researcher.py").read_text() == "my changes" and not (folder / "framework_author.py").exists()
    assert CliRunner().invoke(cli.app, ["examples", str(folder), "--force"]).exit_code == 0
    assert (folder / "researcher.py").read_text() == (ROOT / "examples" / "researcher.py").read_text()


@pytest.mark.parametrize(
    "arguments",
    ["researcher.py", "more_devices.py", "sampler_parity.py", "reward_model.py", "addition.py new", "async_grpo.py",
     "count_squares.py", "algorithms/grpo.py"],
)  # fmt: skip
def test_a_small_model_is_computed_with_one_thread(
    arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More would take three times the processor time on a machine that others use."""
    program, *others = arguments.split()
    seen = []

    def build(*_: Any, **options: Any) -> None:
        seen.append(torch.get_num_threads() if "launcher" not in options else int(os.environ["OMP_NUM_THREADS"]))
        sys.exit("seen")

    monkeypatch.setattr(rlcore.TrainEngine, "build", build)
    monkeypatch.setattr(rlcore.InferenceEngine, "build", build)
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(sys, "argv", [program, *others])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(SystemExit, match="seen"):
            runpy.run_path(str(ROOT / "examples" / program), run_name="__main__")
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_a_wheel_has_the_examples() -> None:
    setuptools = pytest.importorskip("setuptools", reason="what a wheel has is setuptools' choice")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    (where,) = settings.pop("where")
    assert "rlcore.examples" in setuptools.find_namespace_packages(str(ROOT / where), **settings)


@pytest.mark.slow
def test_framework_authors_loss_falls_and_its_memory_is_freed(run_example: Run) -> None:
    *steps, last = run_example("framework_author.py")
    losses = [float(re.findall(r"loss (\S+)", line)[0]) for line in steps]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.05
    # 16.5 million parameters of float32 and two moments of each: 198 MB.
    assert last == "198 MB of cpu:0 are free for somebody else"


@pytest.mark.slow
def test_researchers_reward_rises(run_example: Run) -> None:
    rewards = [float(re.findall(r"reward (\S+)", line)[0]) for line in run_example("researcher.py")]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.3


@pytest.mark.slow
def test_in_float32_the_sampler_says_what_the_trainer_says(run_example: Run, tmp_path: Path) -> None:
    _, _, *rows = run_example("sampler_parity.py", "", "hf", "float32")
    assert [float(row.split()[0]) for row in rows] == [0.5, 1.0, 2.0]
    (model,) = (tmp_path / "cache" / "quickstart").glob("model-*")
    for row in rows:
        mean, p99, most = map(float, row.split()[2:5])
        assert 0 < mean < p99 < most < logprob_rounding(model, num_tokens=32)


@pytest.mark.slow
def test_hardware_buyer_reads_a_record_made_here(
    run_example: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_inputs, "HOST", kernel_inputs.HeadSize(64, 501, 32, kernel_inputs.HOST.dtype))
    device, once = get_device("cpu"), Sampling(min_samples=1, max_samples=1, max_warmup=1)
    run = BenchRun(
        record=new_record(device), path=tmp_path / "mine.json", run=lambda case: run_case(case, device, once)
    )
    run.cases([load_cases()["kernels/linear_loss/8b"]])
    machine, *rows = run_example("hardware_buyer.py", "mine.json")
    assert machine.startswith("mine.json: ") and "torch 2." in machine
    measured = [row for row in rows if "  blocked: " not in row]  # what this device cannot run
    assert {row.split()[1] for row in measured} >= {"reference", "chunked"}
    assert all("GFLOP/s" in row and "GB/s" in row for row in measured)


@pytest.mark.parametrize("name", ["addition.py", "rlite_tutorial.py"])
def test_an_example_that_needs_an_argument_says_which(name: str, tmp_path: Path) -> None:
    result = run_warm([str(ROOT / "examples" / name)], cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(rf"usage: {name} FOLDER .*\n", result.stderr)


def test_hardware_buyer_refuses_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    result = run_warm([str(ROOT / "examples" / "hardware_buyer.py"), "mine.json"], cwd=tmp_path)
    assert result.returncode == 1
    assert "mine.json is no rlcore.bench/1 record" in result.stderr
