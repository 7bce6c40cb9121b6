"""``rlcore train`` trains: apart, shared, by a workflow; it resumes after Ctrl-C and kill -9, nothing twice or lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlcore.cli import main as cli
from rlcore.configuration_file import read_configuration
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.train import TrainEngine
from rlcore.errors import InvalidInputError, RlcoreError, RolloutError, StateError
from rlcore.examples import addition
from rlcore.training.config import TrainConfig
from rlcore.training.program import TrainProgram
from rlcore.training.run_folder import TrainFolder
from tests.warm import ENGINES, kill, warm, warm_workers, without_settings

ROOT = Path(__file__).resolve().parents[2]
ITEMS, BATCH = 64, 4
CONFIG = """
model: {model}
output: {folder}/run
steps: 8
data: {{train: items.jsonl, held_out: items.jsonl, reward: "sevens:reward"}}
algorithm: {{learning_rate: 1e-3, schedule: cosine, warmup_steps: 1, minibatches: 2}}
rollout: {{batch_size: {batch}, samples: 8, max_tokens: 8}}
trainer: {{devices: cpu}}
sampler: {{devices: cpu, options: {{dtype: float32}}}}
evaluation: {{every: 4}}
checkpoint: {{every: 2}}
"""
SEVENS = """
from rlcore.rollout import Grouped, SingleTurn

def reward(item, text):
    return text.count("7") / 8

def workflow(config):
    return Grouped(SingleTurn(reward, {"max_tokens": config.rollout.max_tokens}), config.rollout.samples)
"""

HANGING = """
import pathlib, time

def reward(item, text):
    while pathlib.Path("hang").exists():
        pathlib.Path("hangs").touch()
        time.sleep(0.05)
    return text.count("7") / 8
"""


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    items = [json.dumps({"prompt": f"{number:02d}+{number:02d}="}) for number in range(ITEMS)]
    (tmp_path / "items.jsonl").write_text("\n".join(items))
    (tmp_path / "sevens.py").write_text(SEVENS)
    (tmp_path / "config.yaml").write_text(CONFIG.format(model=model, folder=tmp_path, batch=BATCH))
    return tmp_path


def train(*arguments: str) -> Any:
    found = CliRunner().invoke(cli.app, ["train", "config.yaml", *arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]


def check_episodes(folder: Path, steps: int) -> None:
    """Each step trained on a batch, each item of a pass once, and each episode once."""
    episodes = lines(folder, "episodes")
    assert [one["step"] for one in episodes] == [step for step in range(1, steps + 1) for _ in range(BATCH)]
    assert len({one["number"] for one in episodes}) == len(episodes)
    assert len({one["item"]["prompt"] for one in episodes}) == len(episodes) <= ITEMS
    assert [one["step"] for one in lines(folder, "metrics")] == list(range(steps + 1))


def test_it_learns_asynchronously_and_a_resume_continues_the_run(folder: Path) -> None:
    found = train("steps=6")
    assert found.stdout == f"{folder / 'run' / 'model'}\n" and "step 6/6  reward " in found.stderr
    check_episodes(folder, 6)
    with pytest.raises(InvalidInputError, match="holds a run; add --resume to continue it, or give another output="):
        train()
    changed = (
        r"another seed \(0, now 1\), rollout\.samples \(8, now 4\); give the same configuration, or another output="
    )
    with pytest.raises(InvalidInputError, match=changed):
        train("seed=1", "rollout.samples=4", "--resume")
    train("steps=12", "--resume")
    check_episodes(folder, 12)
    with pytest.raises(InvalidInputError, match=r"run holds a run of 12 steps, and steps is 11; give as many or more"):
        train("steps=11", "--resume")
    metrics = lines(folder, "metrics")
    assert [one["step"] for one in metrics if "held_out_reward" in one] == [0, 4, 6, 8, 12]
    assert sum(one["reward"] for one in metrics[-3:]) > sum(one["reward"] for one in metrics[1:4]) + 0.15
    assert max(one["staleness_max"] for one in metrics[1:]) == 1
    assert {path.name for path in (folder / "run").iterdir()} == {
        *("checkpoint", "config.json", "episodes.jsonl", "metrics.jsonl", "model", "timeline.json", "timeline-6.json")
    }


def test_a_resume_among_other_items_is_refused_and_changes_nothing(folder: Path) -> None:
    """A place in the order of one more item is the place of other items."""
    train("steps=2", "data.held_out=null")
    items = folder / "items.jsonl"
    same = items.read_text()
    items.write_text('{"prompt": "99+99="}\n' + same)
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    told = r"the items of data\.train \(items\.jsonl\) have changed, .*; give them as they were, or another output="
    with pytest.raises(InvalidInputError, match=told):
        train("steps=3", "data.held_out=null", "--resume")
    assert {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()} == before
    items.write_text(same)
    train("steps=3", "data.held_out=null", "--resume")
    check_episodes(folder, 3)


def test_an_evaluation_that_fails_after_a_step_ends_nothing_but_one_before_the_first_step_does(folder: Path) -> None:
    judge = """
calls = 0

def reward(item, text):
    global calls
    calls += item["prompt"] == "held out"
    if item["prompt"] == "held out" and calls == {failing}:
        raise RuntimeError("the judge did not answer")
    return text.count("7") / 8
"""
    (folder / "held_out.jsonl").write_text('{"prompt": "held out"}\n')
    for name, failing in (("fails_first", 1), ("fails_second", 2)):
        (folder / f"{name}.py").write_text(judge.format(failing=failing))
    once = "steps=2", "evaluation.every=1", "data.held_out=held_out.jsonl"
    with pytest.raises(RolloutError, match="none of 1 episodes ended well: RuntimeError: the judge did not answer"):
        train(*once, "data.reward=fails_first:reward", f"output={folder / 'first'}")
    found = train(*once, "data.reward=fails_second:reward")
    told = "step 1 has no held_out_reward: RolloutError: none of 1 episodes ended well: RuntimeError: the judge did not"
    assert told in found.stderr
    check_episodes(folder, 2)
    assert [one["step"] for one in lines(folder, "metrics") if "held_out_reward" in one] == [0, 2]


def test_a_run_whose_engines_cannot_start_leaves_the_folder_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorboard = types.SimpleNamespace(SummaryWriter=lambda path: Path(path).mkdir())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    wrong = "sampler.options={dtype: float33}", "metrics.tensorboard=true"
    with pytest.raises(RlcoreError, match="float33"):
        train(*wrong)
    assert not (folder / "run").exists()
    (folder / "run").mkdir()
    config = read_configuration(folder / "config.yaml", ["steps=3"], TrainConfig)
    with TrainFolder(config, resume=False) as run:  # of a run that was killed before its first checkpoint
        run.begin()
        run.append("metrics", [{"step": 0}])
    before = {path: path.read_bytes() for path in (folder / "run").iterdir()}
    with pytest.raises(RlcoreError, match="float33"):
        train(*wrong, "--resume")
    assert {path: path.read_bytes() for path in (folder / "run").iterdir()} == before


def test_a_batch_is_cut_into_as_many_minibatches_as_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their number does not divide that of its sequences, here 32."""
    sizes: list[int] = []
    train_batch = TrainEngine.train_batch

    def counted(engine: TrainEngine, batch: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        sizes.append(len(batch["input_ids"]))
        return train_batch(engine, batch, *arguments, **options)

    monkeypatch.setattr(TrainEngine, "train_batch", counted)
    train("steps=1", "algorithm.minibatches=7", "evaluation.every=100")
    assert sizes == [5, 5, 5, 5, 4, 4, 4]


SHARED, BY_WORKFLOW = (
    ["placement=shared", "sampler.devices=null"],
    ["rollout.workflow=sevens:workflow", "data.reward=null"],
)


def test_a_step_on_a_shared_device_by_a_workflow(folder: Path) -> None:
    """A workflow gives as many trajectories as it likes, here fewer than there are to be minibatches."""
    few = "steps=1", "evaluation.every=100", "algorithm.minibatches=1000"
    train("rollout.max_staleness=0", *few, *SHARED, *BY_WORKFLOW)
    check_episodes(folder, 1)


@pytest.mark.parametrize("deaths", [1, 2])
def test_the_last_sampler_that_dies_is_started_again_once_a_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    collect, left = InferenceEngine.collect, [deaths]

    def dies(engine: InferenceEngine, timeout_s: float | None = None) -> Any:
        if engine.version == 1 and left[0]:
            left[0] -= 1
            raise StateError("planted: the worker was killed")
        return collect(engine, timeout_s)

    monkeypatch.setattr(InferenceEngine, "collect", dies)
    synchronous = "steps=2", "evaluation.every=100", "rollout.max_staleness=0"  # it dies while the trainer waits
    if deaths > 1:
        with pytest.raises(RolloutError, match="no inference engine is left: sampler 0: planted"):
            train(*synchronous)
        return
    found = train(*synchronous)
    check_episodes(folder, 2)
    assert found.stderr.count("no sampler is left: they are started again") == 1


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [SHARED, BY_WORKFLOW])
def test_it_learns_synchronously_on_a_shared_device_and_by_a_workflow(folder: Path, overrides: list[str]) -> None:
    train("rollout.max_staleness=0", "steps=8", "evaluation.every=100", *overrides)
    check_episodes(folder, 8)
    metrics = lines(folder, "metrics")
    assert {one["staleness_max"] for one in metrics[1:]} == {0}
    assert metrics[-1]["held_out_reward"] > metrics[0]["held_out_reward"] + 0.03


def begin(folder: Path, steps: int = 12, *overrides: str) -> subprocess.Popen[str]:
    """Begin a run in a process of its own, and return when it has done a step beyond its first checkpoint."""
    command = [*warm(*ENGINES), "-m", "rlcore", "train", "config.yaml", f"steps={steps}", "--resume", *overrides]
    process = subprocess.Popen(command, cwd=folder, env=without_settings(), text=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(("step 3/", "step 7/")):
            return process
    raise AssertionError(f"the run ended with {process.wait()}")


@pytest.mark.slow
def test_kill_and_ctrl_c_lose_nothing_and_repeat_nothing(folder: Path) -> None:
    killed = begin(folder)
    kill(killed)
    killed.communicate()
    assert {one["step"] for one in lines(folder, "metrics")} >= {0, 1, 2, 3}

    stopped = begin(folder)  # goes on from step 2
    stopped.send_signal(signal.SIGINT)
    _, told = stopped.communicate()
    assert stopped.returncode == 130 and "stopping after this step; press Ctrl-C again to stop at once" in told
    assert "stopped; continue with: rlcore train config.yaml steps=12 --resume" in told
    done = len(lines(folder, "metrics")) - 1
    check_episodes(folder, done)

    train("steps=12", "--resume")
    check_episodes(folder, 12)
    assert (folder / "run" / f"timeline-{done}.json").exists()
    ended = {one: one.stat().st_mtime_ns for one in (folder / "run").rglob("*") if one.is_file()}
    train("steps=12", "--resume")  # as a scheduler does once more
    assert {one for one, time_ns in ended.items() if one.stat().st_mtime_ns != time_ns} <= {folder / "run/config.json"}
    assert not [one for one in (folder / "run").iterdir() if one.name.startswith(".")]


def test_ctrl_c_before_the_first_checkpoint_says_how_to_begin_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainProgram, "run", interrupted)
    found = CliRunner().invoke(cli.app, ["train", "config.yaml"])
    told = "stopped at once, before the first checkpoint; begin again with: rlcore train config.yaml --resume"
    assert found.exit_code == 130 and told in found.stderr


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once_though_a_reward_hangs(folder: Path) -> None:
    (folder / "sevens.py").write_text(HANGING)
    process = begin(folder, 1000, "rollout.max_staleness=0")
    (folder / "hang").touch()
    while not (folder / "hangs").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    # Two signals are one while the first waits to be handled.
    assert any("press Ctrl-C again to stop at once" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130, told
    assert "what was interrupted ended with RolloutTimeoutError: episodes that close() cancelled go on" in told
    assert "stopped at once; continue after the last checkpoint with: rlcore train" in told
    (folder / "hang").unlink()
    steps = len(lines(folder, "metrics")) + 1
    train(f"steps={steps}", "--resume", "rollout.max_staleness=0")
    check_episodes(folder, steps)


@pytest.mark.slow
def test_the_example_imitates_and_goes_on_by_reinforcement(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's task with its tiny model: a short imitation, and few steps in processes of their own."""
    for name in ("addition.py", "addition.yaml"):
        (folder / name).write_bytes((ROOT / "examples" / name).read_bytes())
    monkeypatch.setenv("RLCORE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(addition, "IMITATION_STEPS", 60)
    addition.main(str(folder / "addition-model"))
    with warm_workers():
        found = CliRunner().invoke(cli.app, ["train", "addition.yaml", "steps=3", "output=run", "evaluation.every=2"])
    assert found.exception is None, found.exception
    metrics = lines(folder, "metrics")
    assert [one["step"] for one in metrics if "held_out_reward" in one] == [0, 2, 3]
    assert all(0 < one["reward"] < 1 for one in metrics[1:])
    rewards = [one["rewards"] for one in lines(folder, "episodes")]
    assert len(rewards) == 3 * 32 and all(len(set(group)) == 2 for group in rewards), "drop_equal_groups"
