"""Write random models of one size, dense and a mixture of experts: ``python -m tests.engines.parity_models FOLDER``.

`rlcore parity` compares trainer and sampler on them. A token of the mixture computes as much as one of the dense model.
The larger deviation of the weights gives the sharper distributions of a trained model, in which routes flip more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

_INNER, _ACTIVE, _EXPERTS = 384, 8, 64
_SHAPE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": _ACTIVE * _INNER, "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}  # fmt: skip
_OF_EXPERTS = {
    "num_experts": _EXPERTS, "num_experts_per_tok": _ACTIVE, "moe_intermediate_size": _INNER, "norm_topk_prob": True,
}  # fmt: skip
_SMALL = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}


def write(folder: Path, *, is_small: bool = False) -> None:
    """Write ``dense-02``, ``moe-02``, ``dense-06`` and ``moe-06``, by the standard deviation of their weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = _SHAPE | (_SMALL if is_small else {})
    experts = _OF_EXPERTS | (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128} if is_small else {}
    )
    for name, std in (("02", 0.02), ("06", 0.06)):
        for kind, config in (("dense", Qwen3Config(**shape)), ("moe", Qwen3MoeConfig(**shape | experts))):
            _write(folder / f"{kind}-{name}", config, std, device)


def _write(folder: Path, config: PreTrainedConfig, std: float, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=std)
    model.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), is_small="--small" in sys.argv)
