"""The parts of ``rlcore chaos``: its plans, what it accepts of an error, the damages, and the hostile channel."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import rlcore
from rlcore.chaos import driver, steps
from rlcore.chaos.channel import run_rounds
from rlcore.chaos.checks import ViolationError, check_checkpoint, left_of, strays
from rlcore.chaos.damages import DAMAGES
from rlcore.chaos.driver import options_of, places_of
from rlcore.chaos.engines import Engines
from rlcore.chaos.faults import FAULTS, PAIRS, judge
from rlcore.chaos.model import policy
from rlcore.chaos.plan import INCIDENTS_OF_A_ROUND, Plan, plan_of
from rlcore.chaos.program import IncidentReport
from rlcore.chaos.steps import STEPS
from rlcore.chaos.strike import Strike
from rlcore.cli import main as cli
from rlcore.conformance.tiny_model import write_tiny_model
from rlcore.engines.checkpoints.verify import verify
from rlcore.errors import CheckpointError, WorkerDiedError, WorkerError

PLACES = ["cpu:0", "cpu:1", "cpu:2"]


def plan(seed: int) -> Plan:
    return plan_of(seed, PAIRS, PLACES, "cpu", ("hf",))


def test_a_seed_gives_the_same_plan_and_consecutive_seeds_deal_out_every_pair() -> None:
    assert plan(7) == plan(7) != plan(8)
    num_rounds = -(-len(PAIRS) // INCIDENTS_OF_A_ROUND)
    dealt = [
        (incident.step, incident.fault)
        for seed in range(3 * num_rounds, 4 * num_rounds)
        for incident in plan(seed).incidents
    ]
    assert sorted(dealt) == sorted(PAIRS)
    assert {step for step, _ in PAIRS} == STEPS.keys()


def test_a_machine_with_one_device_has_both_engines_on_it() -> None:
    layout = plan_of(0, PAIRS, ["cuda:0"], "cuda", ("hf",)).layout
    assert (layout.trainers, layout.sampler) == (["cuda:0"], "cuda:0")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--fault", "kil"], "there is no fault 'kil'; did you mean 'kill'?"),
        (["--device", "quantum"], "--device: no device 'quantum'; registered: cpu, cuda, npu"),
        (["--minutes", "0"], "--minutes: it must be a number above 0, got 0"),
        (["--minutes", "nan"], "--minutes: it must be a number above 0, got nan"),
    ],
)
def test_a_wrong_call_is_refused(arguments: list[str], told: str) -> None:
    found = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(cli.app, ["chaos", *arguments])
    assert found.exit_code == 2
    assert told in found.output


def test_an_interrupted_round_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(plan: Any, round_: driver.ChaosRound, show: Any) -> None:
        round_.violations.append("a mixture")
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "_run", interrupted)
    found = CliRunner().invoke(cli.app, ["chaos", "--device", "cpu", "--rounds", "3"])
    assert found.exit_code == 1
    assert "a mixture" in found.output


def test_a_round_that_is_interrupted_again_and_again_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("run", "_end_processes"):
        monkeypatch.setattr(driver._Driven if name == "run" else driver, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(driver.rounds(options_of("cpu", []), 0, lambda line: None, []))
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_round_is_repeated_by_its_seed_and_faults() -> None:
    options = options_of("cpu", ["kill", "stop"])
    assert options.command(5) == "rlcore chaos --seed 5 --rounds 1 --device cpu --fault kill --fault stop"
    assert {fault for _, fault in options.pairs()} == {"kill", "stop"}


def test_one_device_is_the_only_one_that_is_used() -> None:
    assert options_of("cpu:2", []).command(0) == "rlcore chaos --seed 0 --rounds 1 --device cpu:2"
    assert places_of("cpu:2") == ["cpu:2"]
    assert places_of("cpu") == PLACES


def test_the_step_build_builds_although_there_are_engines() -> None:
    engines = mock.Mock()
    steps.build(engines, random.Random(0))
    assert engines.mock_calls == [mock.call.close(), mock.call.build()]


# ---------------------------------------------------------------------------------------------------- judged


def struck(engines: Any = None, step: str = "train") -> Strike:
    return Strike(engines, step, random.Random(0), rank=1, device="cpu:1", has_struck=True)


def died(rank: int, how: str = "was killed by SIGKILL") -> WorkerDiedError:
    return WorkerDiedError(rank=rank, device=f"cpu:{rank}", method="train_step", how=how)


def test_an_error_that_keeps_the_promises_is_accepted() -> None:
    judge(FAULTS["kill"], struck(), died(1), 3.0)
    judge(FAULTS["kill"], struck(step="close"), None, 3.0)
    judge(FAULTS["none"], struck(), None, 3.0)


@pytest.mark.parametrize(
    ("fault", "error", "seconds", "told"),
    [
        ("kill", died(0), 1.0, r"rank 1 \(cpu:1\) was struck, and the error blames another"),
        ("kill", died(1, "was ended"), 1.0, "does not say 'SIGKILL'"),
        ("kill", None, 1.0, "train went on as if nothing had happened"),
        ("kill", KeyError("weights"), 1.0, "WorkerDiedError or .* was promised, and KeyError came"),
        ("kill", died(1), 1000.0, "train took 1000 s, at most 100 s were promised"),
        ("stop", died(1), 1.0, "WorkerTimeoutError or .* was promised, and WorkerDiedError came"),
        ("none", died(1), 1.0, "no error was promised, and WorkerDiedError came"),
        ("closed_descriptors", died(1, "(sent by somebody, or ...)"), 1.0, "says 'sent by somebody', which is not so"),
        (
            "no_memory",
            WorkerError(rank=1, device="cpu:1", method="run", error="MemoryError", traceback=""),
            1.0,
            r"does not say '.*1073741824 bytes were asked for.*Held by rlcore here'",
        ),
    ],
)
def test_an_error_that_breaks_one_is_told(fault: str, error: BaseException | None, seconds: float, told: str) -> None:
    with pytest.raises(ViolationError, match=told):
        judge(FAULTS[fault], struck(), error, seconds)


# --------------------------------------------------------------------------------------------------- damages


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saves of one engine, in "checkpoint-older" and "checkpoint"."""
    folder = tmp_path_factory.mktemp("saved")
    write_tiny_model(folder / "model")
    with rlcore.meta_device():
        module = policy(folder / "model")
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu", launcher="inline")
        engine.call("run", _begin_optimizer)
        engine.save(folder / "checkpoint-older", {"number": 1})
        engine.save(folder / "checkpoint", {"number": 2})
    return folder


def _begin_optimizer(module: Any) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    module.optimizer.step()
    module.optimizer.zero_grad()


def test_a_whole_checkpoint_passes_and_one_of_another_save_does_not(saved: Path) -> None:
    folder = saved / "checkpoint"
    check_checkpoint(folder, [1, 2])
    assert strays(folder) == []
    with pytest.raises(ViolationError, match=r"the folder has save 2, where one of \[1\] was the last"):
        check_checkpoint(folder, [1])
    with pytest.raises(ViolationError, match="the folder has no whole checkpoint"):
        check_checkpoint(saved / "model", [1])


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "lacking_group"])
def test_each_damage_is_one_that_verify_finds(saved: Path, copy_of_saved: Path, kind: str) -> None:
    for seed in range(3):
        folder = copy_of_saved / str(seed) / "checkpoint"
        words = DAMAGES[kind](folder, random.Random(seed))
        with contextlib.suppress(CheckpointError):
            assert not verify(folder).is_whole, words


@pytest.fixture
def copy_of_saved(saved: Path, tmp_path: Path) -> Path:
    for seed in range(3):
        shutil.copytree(saved, tmp_path / str(seed), ignore=shutil.ignore_patterns("model"))
    return tmp_path


def test_what_is_left_is_found(tmp_path: Path) -> None:
    for name in ("runtime/store-1", "tmp/left", "runtime/ipc-7-x.sock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert left_of(tmp_path, [], besides=7) == ["runtime/store-1", "tmp/left"]
    folder = tmp_path / "checkpoint"
    for name in (".manifest.json.abcdefgh", "manifest.json", "data-0123456789ab/commit", "data-0123456789ac/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert strays(folder) == [".manifest.json.abcdefgh", "data-0123456789ac/x", "data-0123456789ac"]


@pytest.mark.parametrize("name", ["tmp/rlcore-export", "tmp/pymp-1", "runtime/store-1"])
def test_whatever_a_program_leaves_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(driver, "_GONE_S", 0.0)
    (tmp_path / name).mkdir(parents=True)
    round_ = driver.ChaosRound(0, "rlcore chaos")
    driver._Driven(plan(0), round_, tmp_path, lambda line: None)._check_left("after the end")
    assert round_.violations == [f"after the end there are still: {name}"]


# --------------------------------------------------------------------------------------------------- channel


def test_rounds_over_an_honest_channel_are_whole() -> None:
    run_rounds("", random.Random(0))


def test_messages_of_the_program_are_plain_data() -> None:
    told = IncidentReport(kind="end", violation="x", makers=[1])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=IncidentReport) == told
    assert Engines(plan(0).layout, Path("/nowhere")).built == []
