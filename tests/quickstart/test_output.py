"""A run's folder keeps the curve whole: kills, full disks, other runs and other processes are real here."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import CheckpointError, InvalidInputError
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.output import PHASES, RunFolder


@pytest.fixture
def config(tmp_path: Path) -> QuickstartConfig:
    return QuickstartConfig(output=tmp_path / "out" / "run")


def metrics(step: int) -> dict[str, float]:
    spent = {f"{phase}_s": 0.1 * (i + 1) for i, phase in enumerate(PHASES)}
    measured = {"accuracy": 0.3 + step / 20} if step % 5 == 0 else {}
    return {"step": step, "reward": 0.4 + step / 25, **spent, **measured}


def write_steps(config: QuickstartConfig, steps: int) -> Path:
    with RunFolder(config) as folder:
        folder.begin()
        for step in range(steps + 1):
            folder.append(metrics(step))
    return config.output / "metrics.jsonl"


# ------------------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("model", "folder", "a pathlib.Path or None"),
        ("device", "", 'a name such as "cpu" or "cuda:1", or None'),
        ("device", "cuda 1", 'a name such as "cpu" or "cuda:1", or None'),
        ("seed", -1, "a whole number in [0, 2**63)"),
        ("seed", 2**63, "a whole number in [0, 2**63)"),
        ("seed", True, "a whole number in [0, 2**63)"),
        ("threads", 0, "a whole number from 1 to 1024, or None"),
        ("threads", 1025, "a whole number from 1 to 1024, or None"),
        ("threads", True, "a whole number from 1 to 1024, or None"),
        ("steps", 0, "a whole number of at least 1"),
        ("steps", 10.0, "a whole number of at least 1"),
        ("output", "outputs", "a pathlib.Path"),
        ("resume", 1, "True or False"),
        ("shuffle_rewards", None, "True or False"),
    ],
)
def test_a_config_names_its_wrong_field(field: str, value: Any, accepted: str) -> None:
    message = re.escape(f"QuickstartConfig.{field} must be {accepted}, got {value!r}")
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        QuickstartConfig(**{field: value})


def test_a_config_comes_back_from_json() -> None:
    config = QuickstartConfig(
        model=Path("a folder/of mine"),
        device="cuda:1",
        seed=2**63 - 1,
        steps=7,
        output=Path("o"),
        resume=True,
    )
    assert QuickstartConfig.from_json(config.to_json()) == config
    assert QuickstartConfig.from_json(QuickstartConfig().to_json()) == QuickstartConfig()


def test_the_command_that_resumes_names_the_folder_which_has_the_options() -> None:
    config = QuickstartConfig(model=Path("a model"), seed=3, output=Path("an o"), shuffle_rewards=True)
    command = shlex.split(config.resume_command())
    assert command[command.index("quickstart") :] == ["quickstart", "--resume", "--output", "an o"]
    assert QuickstartConfig().resume_command().endswith(" quickstart --resume")
    assert shutil.which(command[0])


def test_a_resumed_run_has_the_options_of_its_folder_but_for_those_that_are_given(tmp_path: Path) -> None:
    config = QuickstartConfig(model=Path("/m"), device="cpu", seed=3, steps=7, output=tmp_path, shuffle_rewards=True)
    with RunFolder(config) as folder:
        folder.begin()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert QuickstartConfig.resuming(moved) == replace(config, output=moved, resume=True)
    given = QuickstartConfig.resuming(moved, steps=9, device="cuda:1")
    assert given == replace(config, output=moved, resume=True, steps=9, device="cuda:1")
    assert QuickstartConfig.resuming(tmp_path, seed=1) == QuickstartConfig(output=tmp_path, resume=True, seed=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": "0"}, "Expected `int`, got `str`"),
        ({"output": 3}, "a Path must be a string, got 3"),
        ({"colour": "red"}, "it must have the fields .* and has .*'colour'"),
    ],
)
def test_a_config_that_was_not_ours_is_refused(change: dict[str, Any], message: str) -> None:
    data = json.dumps(json.loads(QuickstartConfig().to_json()) | change).encode()
    with pytest.raises(CheckpointError, match=message):
        QuickstartConfig.from_json(data)


def test_a_config_that_is_no_json_is_refused() -> None:
    with pytest.raises(CheckpointError, match="truncated"):
        QuickstartConfig.from_json(b'{"seed": 1')


# ------------------------------------------------------------------------------------------- which folders


def test_a_folder_that_holds_another_run_is_refused_and_described(config: QuickstartConfig) -> None:
    write_steps(config, 3)
    message = (
        f"{config.output} holds another run (its own model, seed 0, 3 of 100 steps done); "
        "add --resume to continue it, or use another --output"
    )
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        RunFolder(config)


def test_a_folder_of_other_things_is_refused_and_left_alone(config: QuickstartConfig) -> None:
    config.output.mkdir(parents=True)
    (config.output / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidInputError, match=r"exists and is not a quickstart run; use another --output"):
        RunFolder(config)
    with pytest.raises(CheckpointError, match=r"holds no run to resume: it has no run.json; give the --output of a"):
        RunFolder(replace(config, resume=True))
    assert [file.name for file in config.output.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("record", ['{"name": "my experiment"}', "hello", "[" * 100_000])
def test_a_run_json_of_somebody_else_is_refused_and_left_alone(config: QuickstartConfig, record: str) -> None:
    config.output.mkdir(parents=True)
    (config.output / "run.json").write_text(record)
    (config.output / "metrics.jsonl").write_text('{"step": 0}\n')
    for is_resumed in (False, True):
        with pytest.raises(CheckpointError, match=r"run\.json cannot be read: .*; use another --output"):
            RunFolder(replace(config, resume=is_resumed))
    assert (config.output / "run.json").read_text() == record
    assert (config.output / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_model_without_a_checkpoint_is_not_replaced(config: QuickstartConfig) -> None:
    with RunFolder(config) as folder:
        folder.begin()
        folder.model.mkdir()
    with pytest.raises(InvalidInputError, match="holds another run"):
        RunFolder(config)
    with (
        RunFolder(replace(config, resume=True)) as folder,
        pytest.raises(CheckpointError, match="has a trained model and no checkpoint; put"),
    ):
        folder.has_checkpoint()


def test_a_file_in_the_place_of_the_folder_is_refused(config: QuickstartConfig) -> None:
    config.output.parent.mkdir()
    config.output.write_text("")
    with pytest.raises(InvalidInputError, match="exists and is not a quickstart run"):
        RunFolder(config)
    config = replace(config, output=config.output / "below")
    with pytest.raises(CheckpointError, match=r"cannot make .*: Not a directory.*use another --output"):
        RunFolder(config)


def test_a_folder_made_for_a_run_that_does_not_begin_is_gone(config: QuickstartConfig) -> None:
    RunFolder(config).close()
    assert not config.output.parent.exists()
    config.output.parent.mkdir()
    RunFolder(config).close()
    assert config.output.parent.is_dir() and not config.output.exists()


def test_an_empty_folder_is_taken_and_left_by_a_run_that_does_not_begin(config: QuickstartConfig) -> None:
    config.output.mkdir(parents=True)
    RunFolder(config).close()
    assert config.output.is_dir() and not any(config.output.iterdir())
    with RunFolder(config) as folder:
        folder.begin()
    assert QuickstartConfig.from_json((config.output / "run.json").read_bytes()) == config


def test_a_run_without_a_checkpoint_leaves_the_folder_to_another(config: QuickstartConfig) -> None:
    with RunFolder(config) as folder:
        folder.begin()
        folder.append({"step": 0, "accuracy": 0.3})
    with RunFolder(replace(config, resume=True)) as folder:
        assert not folder.has_checkpoint()
        assert len(folder.read()) == 1
        folder.go_on(-1)
        assert folder.read() == []
    with RunFolder(replace(config, seed=1)) as folder:
        folder.begin()
        assert folder.read() == []
        folder.append({"step": 0, "accuracy": 0.3})
        folder.checkpoint.mkdir()
        (folder.checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(InvalidInputError, match=r"holds another run \(its own model, seed 1, 0 of 100 steps done\)"):
        RunFolder(config)
    with RunFolder(replace(config, seed=1, resume=True)) as folder:
        assert folder.has_checkpoint()


def test_a_checkpoint_that_is_gone_is_missed(config: QuickstartConfig) -> None:
    write_steps(config, 3)
    message = (
        f"{config.output} has the metrics of 3 steps and no checkpoint; put {config.output / 'checkpoint'} back, "
        "or start again with another --output"
    )
    with (
        RunFolder(replace(config, resume=True)) as folder,
        pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"),
    ):
        folder.has_checkpoint()


def test_resume_refuses_another_run(config: QuickstartConfig) -> None:
    write_steps(config, 1)
    other = replace(config, resume=True, seed=1, model=Path("m"))
    message = re.escape("it holds a run with model None, not m; seed 0, not 1; give the same options, or another")
    with pytest.raises(InvalidInputError, match=message):
        RunFolder(other)


def test_resume_may_go_on_for_longer_on_another_device(config: QuickstartConfig) -> None:
    write_steps(config, 1)
    longer = replace(config, resume=True, steps=200, device="cpu")
    with RunFolder(longer) as folder:
        folder.go_on(1)
        folder.append(metrics(2))
        assert [line["step"] for line in folder.read()] == [0, 1, 2]
    assert QuickstartConfig.from_json((config.output / "run.json").read_bytes()).steps == 200


def test_resume_names_a_damaged_record(config: QuickstartConfig) -> None:
    write_steps(config, 1)
    (config.output / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read: .*; use another --output"):
        RunFolder(replace(config, resume=True))


def test_a_second_process_is_kept_out_until_the_first_one_is_killed(config: QuickstartConfig) -> None:
    code = f"""
import time
from pathlib import Path
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.output import RunFolder
folder = RunFolder(QuickstartConfig(output=Path({str(config.output)!r})))
folder.begin()
print("taken", flush=True)
time.sleep(300)
"""
    again = replace(config, resume=True)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"taken\n"
        with pytest.raises(CheckpointError, match="is in use by another process; wait for it to end"):
            RunFolder(again)
        process.kill()
    RunFolder(again).close()


# ------------------------------------------------------------------------------------------------- metrics


def test_metrics_come_back_as_they_were(config: QuickstartConfig) -> None:
    with RunFolder(config) as folder:
        folder.begin()
        folder.append(metrics(1))
        folder.append({"step": 2, "reward": math.nan})
        first, second = folder.read()
    assert first == metrics(1)
    assert second["step"] == 2 and math.isnan(second["reward"])
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reward": 1.0}, r"need 'step', got \['reward'\]"),
        ({"step": 1, "reward": "high"}, "'reward' must be a number, got 'high'"),
    ],
)
def test_metrics_that_are_none_are_refused(config: QuickstartConfig, wrong: Any, message: str) -> None:
    with RunFolder(config) as folder:
        folder.begin()
        with pytest.raises(InvalidInputError, match=message):
            folder.append(wrong)
        assert folder.read() == []


def test_what_is_after_the_checkpoint_is_dropped(config: QuickstartConfig) -> None:
    write_steps(config, 7)
    with RunFolder(replace(config, resume=True)) as folder:
        folder.go_on(5)
        for step in (6, 7, 8):
            folder.append(metrics(step))
        assert folder.read() == [metrics(step) for step in range(9)]
        folder.go_on(-1)
        assert folder.read() == []


def test_a_line_cut_short_does_not_count_and_does_not_spoil_the_next(config: QuickstartConfig) -> None:
    path = write_steps(config, 3)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidInputError, match="2 of 100 steps done"):
        RunFolder(config)
    with RunFolder(replace(config, resume=True)) as folder:
        folder.go_on(2)
        folder.append(metrics(3))
        assert folder.read() == [metrics(step) for step in range(4)]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([], "has 0 for step 0"),
        ([0, 1], "has 0 for step 2"),
        ([1, 2, 3], "has 0 for step 0"),
        ([0, 1, 3], "has 0 for step 2"),
        ([0, 1, 1, 2, 3], "has 2 for step 1"),
        (None, "has 0 for step 0"),
    ],
)
def test_a_run_whose_metrics_were_cut_is_not_gone_on_with_and_left_as_it_is(
    config: QuickstartConfig, lines: list[int] | None, wrong: str
) -> None:
    path = write_steps(config, 3)
    whole = path.read_text().splitlines(keepends=True)
    if lines is None:
        path.unlink()
    else:
        path.write_text("".join(whole[line] for line in lines) + '{"step": 4, "cut')
    before = {file.name: file.read_bytes() for file in config.output.iterdir()}
    message = (
        f"{path} must have 1 line for each step from 0 to 3, after which the checkpoint is, and {wrong}; "
        "put the file back as it was, or start again with another --output"
    )
    with (
        RunFolder(replace(config, resume=True, steps=200)) as folder,
        pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"),
    ):
        folder.go_on(3)
    assert {file.name: file.read_bytes() for file in config.output.iterdir()} == before


def test_a_run_is_not_resumed_to_end_before_where_it_is(config: QuickstartConfig) -> None:
    write_steps(config, 7)
    before = (config.output / "run.json").read_bytes()
    message = re.escape(f"--steps must be at least 7, the steps that {config.output} has done, got 6")
    with (
        RunFolder(replace(config, resume=True, steps=6)) as folder,
        pytest.raises(InvalidInputError, match=f"^{message}$"),
    ):
        folder.go_on(7)
    assert (config.output / "run.json").read_bytes() == before


@pytest.mark.parametrize("line", [b'{"step": 2, "rew\n', b'{"reward": 1.0}\n', b'{"step": null}\n', b"\x00\x00\n"])
def test_a_damaged_line_is_named(config: QuickstartConfig, line: bytes) -> None:
    path = write_steps(config, 1)
    with path.open("ab") as file:
        file.write(line)
    with (
        RunFolder(replace(config, resume=True)) as folder,
        pytest.raises(
            CheckpointError,
            match=r"line 3 of .*metrics\.jsonl is damaged: .*; put the file back as it was, or start again",
        ),
    ):
        folder.read()


def test_a_step_is_on_disk_when_it_was_appended(config: QuickstartConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a step whose metrics a power failure took could not be resumed."""
    flushed: list[str] = []
    with RunFolder(config) as folder:
        folder.begin()
        monkeypatch.setattr(os, "fsync", lambda number: flushed.append(Path(f"/proc/self/fd/{number}").read_text()))
        folder.append({"step": 1})
        assert flushed == ['{"step":1}\n']


@pytest.mark.slow
def test_a_kill_while_steps_are_written_loses_at_most_the_last(config: QuickstartConfig) -> None:
    code = f"""
from pathlib import Path
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.output import RunFolder
folder = RunFolder(QuickstartConfig(output=Path({str(config.output)!r})))
folder.begin()
for step in range(10**9):
    folder.append({{"step": step}})
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "200\n":
            pass
        process.send_signal(signal.SIGKILL)
        reported = [200, *map(int, process.stdout.read().split("\n")[:-1])]
    with RunFolder(replace(config, resume=True)) as folder:
        steps = [line["step"] for line in folder.read()]
    assert steps == list(range(len(steps)))
    assert reported[-1] <= steps[-1] <= reported[-1] + 1


def test_a_full_disk_keeps_the_steps_before(config: QuickstartConfig, run_python: Callable[..., Any]) -> None:
    path = write_steps(config, 3)
    size = path.stat().st_size
    code = f"""
import resource
from pathlib import Path
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.output import RunFolder
folder = RunFolder(QuickstartConfig(output=Path({str(config.output)!r}), resume=True))
resource.setrlimit(resource.RLIMIT_FSIZE, ({size} + 10, {size} + 10))
folder.append({{"step": 4, "reward": 0.123456789}})
"""
    done = run_python(code)
    assert done.returncode == 1
    message = f"CheckpointError: cannot append a step's metrics to {config.output}: File too large; what was there"
    assert message in done.stderr
    assert path.stat().st_size == size
    with RunFolder(replace(config, resume=True)) as folder:
        assert folder.read() == [metrics(step) for step in range(4)]


# ------------------------------------------------------------------------------------------------- picture


def test_the_picture_is_a_png_of_the_curve(config: QuickstartConfig) -> None:
    from matplotlib import image

    write_steps(config, 15)
    with RunFolder(replace(config, resume=True)) as folder:
        path = folder.draw()
        full = path.read_bytes()
        pixels = image.imread(path)
        folder.go_on(3)
        folder.draw()
    assert path == config.output / "reward.png"
    assert full.startswith(b"\x89PNG") and struct.unpack(">II", full[16:24]) == (1200, 900)
    assert pixels.shape[:2] == (900, 1200)
    blue = (abs(pixels[:, :, 2] - 0.7) < 0.15) & (pixels[:, :, 0] < 0.4)
    assert blue.sum() > 500  # the line of rewards, from end to end
    assert path.read_bytes() != full


def test_a_run_without_a_step_has_an_empty_picture(config: QuickstartConfig) -> None:
    with RunFolder(config) as folder:
        folder.begin()
        assert folder.draw().stat().st_size > 5_000


def test_a_picture_that_does_not_fit_leaves_the_one_before(
    config: QuickstartConfig, run_python: Callable[..., Any]
) -> None:
    write_steps(config, 5)
    with RunFolder(replace(config, resume=True)) as folder:
        before = folder.draw().read_bytes()
    code = f"""
import resource
from pathlib import Path
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.output import RunFolder
folder = RunFolder(QuickstartConfig(output=Path({str(config.output)!r}), resume=True))
resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
folder.draw()
"""
    done = run_python(code)
    assert "CheckpointError: cannot write reward.png to" in done.stderr
    assert (config.output / "reward.png").read_bytes() == before
    assert not list(config.output.glob(".*"))
