"""Weights of verl's trainer ranks, by rlcore's plan, in the vLLM of verl's rollout: verl's real classes, on CPUs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sampling.vllm.stock import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="verl is not installed: pip install 'verl>=0.9.1'"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
ROUND = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]


def ranks(number: int, kind: str, folder: Path, out: Path) -> list[dict[str, Any]]:
    """Return what the trainer ranks say, each with a vLLM of its own."""
    variables = environment(out) | {"VERL_ENGINE_VENDOR": "rlcore", "VERL_ENGINE_DEVICE": "cuda"}
    with (out / "rlcore-0.dist-info" / "entry_points.txt").open("a") as entry_points:
        entry_points.write("[verl.plugins]\nrlcore = rlcore.integrations.verl.plugin\n")
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.verl_rank"]
    logs = [
        (out / f"log-{rank}").open("w+") for rank in range(number)
    ]  # no pipe, which a process of vLLM could keep open
    running = [
        subprocess.Popen(
            [*command, str(rank), str(number), str(folder), str(out), kind],
            env=variables, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    for process in running:
        process.wait(1400)
    for log in logs:
        log.close()
    said = [Path(log.name).read_text() for log in logs]
    assert [process.returncode for process in running] == [0] * number, "\n".join(said)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(number)]


def write_model(folder: Path, **shape: Any) -> Path:
    """Write a small random model that says something else after every step."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, initializer_range=0.2, **sizes, **shape)).save_pretrained(folder)
    return folder


def check_rounds(said: dict[str, Any]) -> None:
    """After each update vLLM completes as transformers with the trainer's weights, which stay where they were."""
    tokens = [said["first"], *(found for found, _, _ in said["rounds"])]
    assert all(found == expected for found, expected, _ in said["rounds"])
    assert len({str(one) for one in tokens}) == 4, "each step changes what is completed"
    assert [where for *_, where in said["rounds"]] == ["loaded", "loaded", "offloaded"]
    assert said["steps"] == [5, 6, 7]


def test_two_sharded_ranks_give_their_weights_to_two_replicas(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", hidden_size=64, intermediate_size=96)
    for said in ranks(2, "modules", folder, tmp_path):
        check_rounds(said)
        assert said["calls"] == ["init_weight_transfer_engine", *ROUND * 3]
        strange, several, unwilling = said["refused"]
        assert strange.startswith(
            "InvalidInputError: rlcore_ipc takes the weights of rlcore's engine where they are, got "
        )
        assert several.startswith("UnsupportedError: verl's rollout with rlcore_ipc over several machines is not supp")
        assert unwilling.startswith("SyncError: vLLM's workers did not connect: ")
        assert "RuntimeError: no backend rlcore_ipc" in unwilling


@pytest.mark.vllm
def test_the_same_with_real_vllm_and_verls_worker_extension(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    (said,) = ranks(1, "vllm", folder, tmp_path)
    check_rounds(said)
