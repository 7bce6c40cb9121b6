"""``rlcore checkpoint verify``: what is in a folder, and which file is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlcore.cli import main as cli
from rlcore.engines.checkpoints.checkpoint import Save
from rlcore.engines.checkpoints.saved_tensor import parts_of
from rlcore.engines.checkpoints.tensor_file import Stamp
from rlcore.errors import CheckpointError

SAVE = "0123456789ab"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"optimizers": {"adam": {}}, "schedulers": {}, "random_states_of": "1 cpu worker", "extra": {"step": 3}}
    save = Save(tmp_path, Stamp(SAVE), rank=0, size=1, groups=["weights", "optimizer"], state=state)
    with save.held():
        save.write({"weights": parts_of({"w": torch.ones(3), "v": torch.ones(2, 2)}), "optimizer": {}})
    return tmp_path


def damage(folder: Path) -> None:
    file = next(folder.glob("*/weights-0.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


def test_verify_prints_what_is_in_a_checkpoint(folder: Path) -> None:
    result = CliRunner().invoke(cli.app, ["checkpoint", "verify", str(folder)])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines() if line.strip()]
    size, empty = (next(folder.glob(f"*/{name}-0.safetensors")).stat().st_size for name in ("weights", "optimizer"))
    assert lines == [
        f"folder {folder}",
        "format rlcore.checkpoint/4",
        f"save {SAVE}",
        "digests xxh3_128",
        "written by 1 cpu worker",
        "optimizers ['adam']",
        "extra {'step': 3}",
        "tensors bytes file damage",
        f"OK 2 {size} data-{SAVE}/weights-0.safetensors",
        f"OK 0 {empty} data-{SAVE}/optimizer-0.safetensors",
    ]


def test_verify_names_damage_and_exits_with_1(folder: Path, run_python: Any) -> None:
    damage(folder)
    result = run_python(["-m", "rlcore", "checkpoint", "verify", str(folder)])
    assert result.returncode == 1
    assert result.stderr == f"rlcore: {folder} is damaged: data-{SAVE}/weights-0.safetensors\n"
    assert result.stdout.splitlines()[-2].endswith("weights-0.safetensors  the data of w differ from their digest")


def test_verify_as_json_is_all_there_is_on_stdout(folder: Path) -> None:
    found = json.loads(CliRunner().invoke(cli.app, ["checkpoint", "verify", str(folder), "--json"]).stdout)
    assert found["is_whole"] and found["files"][0]["error"] == "" and found["state"]["extra"] == {"step": 3}
    damage(folder)
    result = CliRunner().invoke(cli.app, ["checkpoint", "verify", str(folder), "--json"])
    assert isinstance(result.exception, CheckpointError)
    found = json.loads(result.stdout)
    assert not found["is_whole"] and found["files"][0]["error"] == "the data of w differ from their digest"


def test_verify_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["checkpoint", "verify", str(tmp_path / "absent")])
    assert isinstance(result.exception, CheckpointError)
    assert "is no folder; give the one that save() or export() wrote" in str(result.exception)
