"""The folder of ``rlcore train``: what is there is never overwritten by a wrong call, and its logs are whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import CheckpointError, InvalidInputError
from rlcore.training.config import CheckpointSection, DataSection, RolloutSection, TrainConfig
from rlcore.training.run_folder import TrainFolder

EVERY, BATCH = 2, 3


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        model="m",
        output=str(tmp_path / "run"),
        data=DataSection(train="items.jsonl", reward="judge:reward"),
        rollout=RolloutSection(batch_size=BATCH),
        checkpoint=CheckpointSection(every=EVERY),
    )


def write_run(config: TrainConfig, steps: int, *, checkpoint: bool = True) -> Path:
    """Write the folder of a run that has done so many steps."""
    with TrainFolder(config, resume=False) as folder:
        folder.begin()
        folder.append("metrics", [{"step": 0}])
        for step in range(1, steps + 1):
            folder.append("episodes", [{"step": step, "number": number} for number in range(BATCH)])
            folder.append("metrics", [{"step": step, "reward": 0.5, "loss": float("nan")}])
        if checkpoint:
            folder.checkpoint.mkdir()
            (folder.checkpoint / "manifest.json").write_text("{}")
        return folder.path


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def steps_of(folder: Path, log: str) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / f"{log}.jsonl").read_text().splitlines()]


def resume(config: TrainConfig, step: int) -> None:
    with TrainFolder(config, resume=True) as folder:
        folder.go_on(step)


def test_a_run_whose_checkpoint_is_gone_is_not_begun_again_over_what_is_there(config: TrainConfig) -> None:
    path = write_run(config, 5, checkpoint=False)
    before = contents(path)
    message = (
        f"{path} has the metrics of 5 steps and no checkpoint, and one was due after 2 steps; "
        f"put {path / 'checkpoint'} back, or give another output="
    )
    for is_resumed in (False, True):
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
            TrainFolder(config, resume=is_resumed)
    assert contents(path) == before


def test_a_trained_model_is_not_replaced_by_another_run(config: TrainConfig) -> None:
    path = write_run(config, 1, checkpoint=False)
    (path / "model").mkdir()
    (path / "metrics.jsonl").unlink()
    for is_resumed in (False, True):
        with pytest.raises(
            CheckpointError,
            match=r"has a trained model and no checkpoint, and one was due after 2 steps; put .* back, or give another",
        ):
            TrainFolder(config, resume=is_resumed)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_where_that_is_asked_for(config: TrainConfig) -> None:
    """A scheduler always gives --resume. A kill may also come while the first checkpoint is written."""
    path = write_run(config, EVERY, checkpoint=False)
    message = (
        f"{path} holds a run of {EVERY} steps without a checkpoint; add --resume to begin it again, or give another"
    )
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        TrainFolder(config, resume=False)
    with TrainFolder(config, resume=True) as folder:
        folder.begin()
        folder.append("metrics", [{"step": 0}])
    assert steps_of(path, "metrics") == [0] and not (path / "episodes.jsonl").exists()
    with TrainFolder(config, resume=False) as folder:  # nothing was trained
        folder.begin()
    assert steps_of(path, "metrics") == []
    assert steps_of(path, "metrics-1") == [0, 1, 2] and {*steps_of(path, "episodes-1")} == {1, 2}  # of the lost part
    assert not (path / "metrics-2.jsonl").exists()


def test_logs_of_a_lost_part_have_one_number_though_a_kill_came_between_them(config: TrainConfig) -> None:
    """The episodes of a step are written before its metrics."""
    path = write_run(config, 0, checkpoint=False)
    with TrainFolder(config, resume=True) as folder:
        folder.append("episodes", [{"step": 1, "number": number} for number in range(BATCH)])
    for _ in range(2):
        with TrainFolder(config, resume=True) as folder:
            folder.begin()
            folder.append("metrics", [{"step": 0}, {"step": 1}])
            folder.append("episodes", [{"step": 1, "number": number} for number in range(BATCH)])
    assert steps_of(path, "metrics-1") == [0] and steps_of(path, "episodes-1") == [1] * BATCH
    assert steps_of(path, "metrics-2") == [0, 1] and steps_of(path, "episodes-2") == [1] * BATCH


def test_a_model_folder_with_other_files_is_told_before_the_run(config: TrainConfig) -> None:
    path = write_run(config, 2)
    (path / "model").mkdir()
    (path / "model" / "README.md").write_text("notes")
    with pytest.raises(CheckpointError, match="model is not empty, and no export of rlcore wrote it"):
        TrainFolder(config, resume=True)
    assert (path / "model" / "README.md").read_text() == "notes"


def test_the_timeline_of_a_resumed_run_is_a_file_of_its_own(config: TrainConfig) -> None:
    with TrainFolder(config, resume=False) as folder:
        assert [folder.timeline(first).name for first in (0, 6)] == ["timeline.json", "timeline-6.json"]


def test_a_new_run_writes_its_configuration_alone_and_last(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrainFolder(config, resume=False) as folder:
        folder.begin()
        assert [file.name for file in folder.path.iterdir()] == ["config.json"]
    path = write_run(config, 3)
    before = (path / "config.json").read_bytes()

    def fails(self: Any, lines: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlcore.step_log.StepLog.replace", fails)
    with pytest.raises(CheckpointError, match="No space left on device"):
        resume(TrainConfig(**{**config.__dict__, "steps": 7}), 2)
    assert (path / "config.json").read_bytes() == before


def test_a_resume_drops_what_comes_after_the_checkpoint(config: TrainConfig) -> None:
    path = write_run(config, 5)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "cut')
    resume(config, 4)
    assert steps_of(path, "metrics") == [0, 1, 2, 3, 4]
    assert steps_of(path, "episodes") == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def without(*numbers: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [line for number, line in enumerate(lines) if number not in numbers]


@pytest.mark.parametrize(
    ("log", "damage", "told"),
    [
        ("metrics", without(2), "1 line for each step from 0 to 4, .* has 0 for step 2"),
        ("metrics", without(4, 5), "1 line for each step from 0 to 4, .* has 0 for step 4"),
        ("metrics", lambda lines: [*lines[:2], *lines[1:]], "1 line for each step from 0 to 4, .* has 2 for step 1"),
        ("metrics", lambda lines: [lines[1], lines[0], *lines[2:]], "has a line of step 1 before one of step 0"),
        ("episodes", without(4), "3 lines for each step from 1 to 4, .* has 2 for step 2"),
        ("episodes", lambda lines: [], "3 lines for each step from 1 to 4, .* has 0 for step 1"),
        ("episodes", lambda lines: [b"\0\0\0\n", *lines[1:]], "line 1 of .*: JSON is malformed"),
        ("metrics", lambda lines: [*lines[:2], b'{"reward": 1}\n'], "line 3 of .*: its step must be a number, got N"),
        ("metrics", lambda lines: [b'{"step": "x"}\n'], "line 1 of .*: its step must be a number, got 'x'"),
        ("metrics", lambda lines: [b'{"step": 1e400}\n'], "line 1 of .* is damaged: "),
        ("episodes", lambda lines: [b"[3]\n"], "line 1 of .*: Expected `object`, got `array`"),
        ("episodes", lambda lines: [b"[" * 100_000 + b"\n"], "line 1 of .* is damaged: "),
    ],
)  # fmt: skip
def test_a_log_that_lacks_something_is_not_gone_on_with_and_all_is_left_as_it_is(
    config: TrainConfig, log: str, damage: Callable[[list[bytes]], list[bytes]], told: str
) -> None:
    path = write_run(config, 5)
    file = path / f"{log}.jsonl"
    file.write_bytes(b"".join(damage(file.read_bytes().splitlines(keepends=True))))
    before = contents(path)
    with pytest.raises(CheckpointError, match=rf"{told}.*; put the file back as it was, or give another output="):
        resume(config, 4)
    assert contents(path) == before


def test_a_log_that_is_gone_is_missed(config: TrainConfig) -> None:
    path = write_run(config, 5)
    (path / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl must have 1 line for each step .* and has 0 for step 0"):
        resume(config, 4)


@pytest.mark.parametrize("wrong", ["{", "3", "{}", '{"checkpoint": 3}', "[" * 100_000])
def test_a_configuration_that_is_not_one_is_refused(config: TrainConfig, wrong: str) -> None:
    path = write_run(config, 1, checkpoint=False)
    known = json.loads((path / "config.json").read_text())
    text = json.dumps(known | json.loads(wrong)) if "checkpoint" in wrong else wrong
    (path / "config.json").write_text(text)
    with pytest.raises((CheckpointError, InvalidInputError), match=r"config\.json (cannot be read|is not the conf)"):
        TrainFolder(config, resume=True)
    assert (path / "config.json").read_text() == text
