"""The environment and the sender's model of tests of a vLLM that is not rlcore's engine."""

from __future__ import annotations

import inspect
import os
import tomllib
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[4]
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
PROMPTS = [[9, 0, 2, 1], [3]]
MAX_TOKENS = 12


def environment(entry_points: Path) -> dict[str, str]:
    """Return the environment of a process with vLLM.

    Args:
        entry_points: a folder, in which is written what pip writes of the project's entry points.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = entry_points / "rlcore-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlcore\nVersion: 0\n")
    lines = "\n".join(f"{name} = {path}" for name, path in project["entry-points"]["vllm.general_plugins"].items())
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{lines}\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(entry_points), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_F32_DEFAULT": "ieee",  # on a GPU vLLM's attention would take TF32, and the tokens are compared
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at the start, and greedy completions need none
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "RLCORE_VLLM_PLAIN_WEIGHTS": "1",  # means something on a CPU only
    }


def policy(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)


@torch.no_grad()
def shake(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.add_(noise * 0.2 * parameter.std())


def greedy(module: Any) -> list[list[int]]:
    """Tokens that transformers completes ``PROMPTS`` with."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": [], "pad_token_id": 0}
        made = module.generate(ids, do_sample=False, max_new_tokens=MAX_TOKENS, **options)
        found.append(made[0, len(prompt) :].tolist())
    return found


def vllms_trainer(info: Any, client: Any, source: Any) -> Any:
    """Return the trainer that vLLM's own factory makes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    make: Any = WeightTransferTrainerFactory.trainer_init
    takes_backend = "config" in inspect.signature(make).parameters  # up to vLLM 0.26
    return make(
        **{"backend": "rlcore_ipc", "config": None} if takes_backend else {},
        init_info=info,
        client=client,
        source=source,
    )
