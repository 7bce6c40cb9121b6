"""The suites for executors pass on the built-in ones, and name each fault that is planted in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conformance.conftest import HERE, Outcome
from tests.conftest import ROOT
from tests.warm import ENGINES, run_warm

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder on the path where the faulty executors are an installed distribution."""
    info = tmp_path / "plugin" / "faulty_executors-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-executors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlcore]\nfaulty = faulty_executors\n")
    return info.parent


def run(folder: Path, kind: str, name: str, *tests: str, plugin: Path | None = None, options: Any = ()) -> Outcome:
    """The suite, or tests of it such as "test_generate::test_...", in an empty folder."""
    suite = f"rlcore.conformance.{kind}_executor"
    named = [f"{suite}.{test}" for test in tests] or ["rlcore.conformance"]
    paths = [os.environ.get("PYTHONPATH", ""), *([str(plugin)] if plugin else []), str(HERE), str(ROOT)]
    arguments = [f"--{kind}-executor", name, "--device", "cpu", "--conformance-json", "report.json", *options]
    (folder / "empty").mkdir()
    found = run_warm(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "warm_peers", "--pyargs", *named, *arguments],
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "RLCORE_PROBE_TIMEOUT_S": "200",  # in which the faulty executors are imported on a busy machine, too
        },
        cwd=folder / "empty",
        modules=ENGINES,
    )
    report = folder / "empty" / "report.json"
    return Outcome(
        found.returncode, found.stdout + found.stderr, json.loads(report.read_text()) if report.exists() else {}
    )


class Fault(NamedTuple):
    kind: str
    name: str
    test: str
    method: str


FAULTS = [
    Fault(*row.split(" ", 3))
    for row in (
        "inference LogProbsOfAnotherTemperature test_generate::test_log_probs_are_the_trainers generate",
        "inference SeedIgnored test_generate::test_a_seed_decides_the_tokens generate",
        "inference SeedOfThePlaceInTheBatch test_generate::test_a_seed_decides_the_tokens generate",
        "inference TooOftenTheLikeliest test_generate::test_tokens_are_as_frequent_as_they_are_likely generate",
        "inference StopTokensIgnored test_generate::test_stop_tokens_end_a_completion generate",
        "inference NoVersionSpans test_weights::test_tokens_say_their_version collect",
        "inference TokensOfNoNumbers test_weights::test_weights_that_are_no_numbers_give_no_tokens generate",
        "inference TooLongPromptsAccepted test_generate::test_bad_prompts_are_refused check_prompts",
        "inference AbortLosesOthers test_requests::test_abort_gives_up_what_it_names abort",
        "inference AbortKeepsTheEnded test_requests::test_abort_gives_up_what_has_ended abort",
        "inference PauseGoesOn test_requests::test_nothing_ends_while_paused pause",
        "inference SyncSkipsOneTensor test_weights::test_a_sync_brings_all_weights sync_call (local)",
        "inference LoadSkipsOneTensor test_weights::test_a_folder_is_loaded take_weights",
        "inference DamagedFoldersAccepted test_weights::test_a_bad_folder_is_refused read_weights",
        "inference OffloadKeepsMemory test_moves::test_weights_move_by_the_table offload",
        "inference OffloadLosesValues test_moves::test_weights_come_back_as_they_were offload",
        "inference ProcessLeft test_ends::test_nothing_is_left_in_the_program close",
        "train MicroBatchesWeighTheSame test_steps::test_steps_are_those_of_plain_pytorch train_step",
        "train NoClipping test_steps::test_steps_are_those_of_plain_pytorch train_step",
        "train ScoresAtTemperatureOne test_steps::test_log_probs_are_those_of_plain_pytorch score",
        "train EvaluationLeavesGradients test_steps::test_an_evaluation_changes_nothing evaluate",
        "train SaveWithoutOptimizer test_state::test_training_resumes_bit_for_bit save",
        "train LoadSkipsTheOptimizer test_state::test_training_resumes_bit_for_bit load",
        "train SaveInTheBackgroundIsLate test_state::test_a_save_in_the_background_is_of_its_moment save",
        "train StateDictIsTheTrainersMemory test_state::test_a_state_dict_comes_back load_state_dict",
        "train LoadStateDictTakesWhatFits test_state::test_a_bad_state_dict_is_refused load_state_dict",
        "train OptimizerIsLost test_offloads::test_training_goes_on_after_an_offload offload",
        "train SenderSkipsOneTensor test_sync::test_a_sampler_gets_all_weights sync_call (local)",
    )
]
"""Executor of faulty_executors.py, the test that has to fail, and the method that it has to name."""
AFTER_EACH_CHANGE = {"SeedOfThePlaceInTheBatch"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in AFTER_EACH_CHANGE else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_a_fault_planted_in_an_executor_is_named(fault: Fault, plugin: Path, tmp_path: Path) -> None:
    few = ("-k", "not two and not direct and not packed and not collective")
    outcome = run(tmp_path, fault.kind, fault.name, fault.test, plugin=plugin, options=few)
    assert outcome.returncode == 1, outcome.output
    member = f"{fault.kind.capitalize()}Executor.{fault.method}"
    assert any(test.startswith(fault.test) for test in outcome.tests("failed")), outcome.output
    assert outcome.report["members"][member]["result"] == "failed"
    broken = [line for line in outcome.output.splitlines() if line.startswith("broken: ")]
    assert broken and all(member in line for line in broken), outcome.output


def test_every_faulty_executor_has_a_test() -> None:
    source = (HERE / "faulty_executors.py").read_text()
    classes = {line.split()[1].partition("(")[0] for line in source.splitlines() if line.startswith("class ")}
    assert classes == {fault.name for fault in FAULTS} | {"WithoutCheckpoints"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("inference", "hf"), ("train", "fsdp2")])
def test_a_built_in_executor_passes(kind: str, name: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, kind, name)
    assert outcome.returncode == 0, outcome.output
    assert outcome.report["executor"] == {"kind": kind, "name": name}
    assert {found["result"] for found in outcome.report["members"].values()} == {"passed"}, outcome.output
    passed = {test.partition("[")[0] for test in outcome.tests("passed")}
    assert passed >= {fault.test for fault in FAULTS if fault.kind == kind}, "what a fault breaks passes without it"
    assert f"conformance of {kind} executor {name} on cpu:0" in outcome.output
    others = {"inference": "test_steps", "train": "test_generate"}[kind]
    assert not any(test.startswith((others, "test_memory::", "test_streams::")) for test in outcome.report["tests"])


def test_what_an_executor_cannot_do_is_declared_with_its_reason(plugin: Path, tmp_path: Path) -> None:
    test = "test_state::test_a_damaged_checkpoint_is_refused"
    outcome = run(tmp_path, "train", "WithoutCheckpoints", test, plugin=plugin, options=("-rs",))
    assert outcome.returncode == 0, outcome.output
    found = outcome.report["members"]["TrainExecutor.load"]
    assert (found["result"], found["support"]) == ("skipped", "unsupported")
    assert found["reason"] == "its state is on other machines"
    assert (
        "TrainExecutor.load is unsupported by train executor WithoutCheckpoints on cpu:0: save() of" in outcome.output
    )


@pytest.mark.slow
def test_what_is_required_and_cannot_be_done_is_a_failure(plugin: Path, tmp_path: Path) -> None:
    test = "test_state::test_a_damaged_checkpoint_is_refused"
    outcome = run(tmp_path, "train", "WithoutCheckpoints", test, plugin=plugin, options=("--require", "load"))
    assert outcome.returncode == 1, outcome.output
    assert "required, and TrainExecutor.load is unsupported by train executor WithoutCheckpoints" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-executor", "fsdp3"], "no train executor 'fsdp3'; registered: "),
        pytest.param(
            ["--inference-executor", "hf", "--require", "levitate"],
            "InferenceExecutor.levitate: names 0 members",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--inference-executor", "hf", "--train-executor", "fsdp2"],
            "are tested one at a time",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no such executor", "no such method", "two at once"],
)
def test_what_cannot_be_run_is_said_before_the_run(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = ["-m", "pytest", "--pyargs", "rlcore.conformance", "--device", "cpu", *arguments]
    found = run_warm(command, cwd=tmp_path, modules=ENGINES)
    assert found.returncode == 4
    assert message in found.stderr
