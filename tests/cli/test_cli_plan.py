"""``rlcore plan``: the devices that engines would get, without starting anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlcore.cli import main as cli
from rlcore.errors import DeviceError

TWO = ["--host", "host-a=cuda:4", "--host", "host-b=cuda:2"]


def plan(*arguments: str) -> Any:
    done = CliRunner().invoke(cli.app, ["plan", *arguments, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["placement"]


def test_the_placement_is_printed_by_host() -> None:
    assert plan("--train", "6", "--infer", "4", "--tensor-parallel", "2", *TWO) == {
        "train": [*(f"host-a/cuda:{i}" for i in range(4)), "host-b/cuda:0", "host-b/cuda:1"],
        "inference": [f"host-a/cuda:{i}" for i in range(4)],
    }
    assert plan("--train", "2", "--infer", "2", "--apart", *TWO)["inference"] == ["host-a/cuda:2", "host-a/cuda:3"]
    assert plan("--train", "4", "--num-hosts", "2", *TWO)["train"][2:] == ["host-b/cuda:0", "host-b/cuda:1"]
    assert plan("--train", "2", "--strategy", "spread", *TWO)["train"] == ["host-a/cuda:0", "host-b/cuda:0"]
    table = CliRunner().invoke(cli.app, ["plan", "--train", "6", *TWO]).stdout.splitlines()
    assert [line.split() for line in table[-2:]] == [
        ["train", "host-a", "0", "to", "3", "cuda:0,", "cuda:1,", "cuda:2,", "cuda:3"],
        ["train", "host-b", "4", "to", "5", "cuda:0,", "cuda:1"],
    ]


def test_what_cannot_be_placed_says_who_has_what() -> None:
    with pytest.raises(DeviceError, match=r"3 devices are needed and 2 can be used: .*is held by the train engine"):
        plan("--train", "4", "--infer", "3", "--apart", *TWO)
    with pytest.raises(DeviceError, match="no accepted host has host_labels rack=r7: host-a has none; host-b has none"):
        plan("--train", "4", "--label", "rack=r7", *TWO)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give a model, or the size of an engine: --train or --infer"),
        (["--train", "1", "--host", "host-a"], "it must be such as host-a=cuda:8, got 'host-a'"),
        (["--train", "1", "--label", "rack"], "it must be such as rack=r7, got 'rack'"),
        (["--train", "1", "--host", "a=cuda:8", "--address", "auto"], "give --host, or --address"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], reason: str) -> None:
    done = CliRunner().invoke(cli.app, ["plan", *arguments])
    assert done.exit_code == 2 and reason in done.output


def test_the_memory_of_a_model_is_printed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512, **sizes}))
    fixed = [str(tmp_path), "--longest", "64", "--max-tokens", "64", "--recompute", "on", "--no-sampler"]
    done = CliRunner().invoke(cli.app, ["plan", *fixed, "--device", "h200", "--memory", "20", "--train", "1", *TWO])
    assert done.exit_code == 0, done.output
    assert "on 1 x h200, 20.00 GiB each" in done.stdout and "host-a" in done.stdout
    found = CliRunner().invoke(cli.app, ["plan", *fixed, "--device", "h200", "--optimizer", "adamw", "--json"])
    assert json.loads(found.stdout)["layout"]["recompute"] is True


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--train", "1", "--longest", "8"], "it is for a plan of memory, which needs MODEL"),
        (["M", "--host", "a=cuda:8"], "it is for the places of engines: give --train or --infer"),
        (["M", "--recompute", "full"], "it must be one of off, selective, on, got 'full'"),
        (["M", "--optimizer", "lion"], "it must be one of adamw, adamw-fused, got 'lion'"),
    ],
)
def test_wrong_options_of_a_plan_of_memory_are_named(arguments: list[str], reason: str) -> None:
    done = CliRunner().invoke(cli.app, ["plan", *arguments])
    assert done.exit_code == 2 and reason in " ".join(done.output.replace("│", " ").split())
