"""Compiled blocks are one graph each: choosing the attention, which cannot be compiled, is done before."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

from .train_batches import packed_batch

choice = pytest.importorskip("rlcore.packed.choice")


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any, **options: Any) -> Tensor:
    """One that can be compiled, unlike the host's own."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_compiled_block_is_one_graph(qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch, recomputes: bool) -> None:
    from torch._dynamo.utils import counters
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    possible = choice.Implementation(attend, lambda call, device: None)
    monkeypatch.setitem(choice.IMPLEMENTATIONS, "per_sequence", possible)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    with rlcore.meta_device():
        module = Policy.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(
            devices="cpu",
            dtype="float32",
            compute_dtype="bfloat16",
            compile=True,
            activation_checkpointing=recomputes,
        )
        for _ in range(2):
            engine.train_batch(packed_batch(), ppo_clip())
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1, "of all blocks, and for both steps"
    torch.compiler.reset()
