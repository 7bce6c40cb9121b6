"""What test_simulated.py runs in the environment of the simulated CANN: ``python simulated_tasks.py TASK``.

The last line of the output is the task's answer, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlcore
from rlcore.errors import UnsupportedError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

STEPS = 4


class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    """A tiny one, trained by AdamW."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def sharded_training() -> dict[str, list[float]]:
    """Losses of FSDP2 on two ranks over the real ProcessGroupHCCL, and of the CPU."""
    folder = _checkpoint()
    return {kind: _losses(folder, [f"{kind}:0", f"{kind}:1"]) for kind in ("cpu", "npu")}


def offloaded_training() -> dict[str, Any]:
    """One NPU's losses, with everything moved to the host and back before each step and without."""
    folder, device = _checkpoint(), rlcore.get_device("npu")
    away: list[int] = []

    def move(engine: rlcore.TrainEngine) -> None:
        before = device.memory.stats().allocated_bytes
        engine.offload()
        away.append(device.memory.stats().allocated_bytes)
        away.append(before)
        engine.onload()

    without = _losses(folder, ["npu:0"])
    with_moves = _losses(folder, ["npu:0"], between=move)
    return {
        "without": without,
        "with moves": with_moves,
        "device bytes away": away[-2],
        "device bytes before": away[-1],
    }


def vendor_format() -> str:
    """What sharing a tensor in format 29 (FRACTAL_NZ) is answered with."""
    import torch_npu

    tensor = torch_npu.empty_with_format((16, 16), dtype=torch.float16, device="npu", acl_format=29)
    try:
        rlcore.get_device("npu").memory.export_ipc(tensor)
    except UnsupportedError as error:
        return str(error)
    return "it was shared"


def _checkpoint() -> Path:
    folder = Path(tempfile.mkdtemp())
    config = Qwen2Config(vocab_size=21, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         tie_word_embeddings=True, dtype="float32")  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def _losses(folder: Path, devices: list[str], between: Any = None) -> list[float]:
    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices=devices, data_parallel_size=len(devices), timeout_s=120)
        losses = []
        for _ in range(STEPS):
            losses.append(engine.train_batch(_batch(), ppo_clip(), max_grad_norm=0.5)["loss"])
            if between is not None:
                between(engine)
    return losses


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (12, 3, 7, 9)
    return {
        "input_ids": torch.randint(21, (sum(lengths),), generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "loss_mask": torch.cat([torch.arange(length) for length in lengths]) >= 2,
        "old_logprobs": torch.full((sum(lengths),), -3.0),
        "advantages": torch.randn(len(lengths), generator=generator),
    }


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
