"""Compiled blocks are one graph each: choosing the attention and making its masks, which cannot be compiled, are done
before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.fsdp2 import block_compiler
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from tests.accuracy import assert_as_accurate

from .plain_training import keep_float64
from .train_batches import VOCAB, packed_batch
from .train_policy import Build, Place, adamw_policy, policy_gradient, truth_of

choice = pytest.importorskip("rlcore.packed.choice")


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any, **options: Any) -> Tensor:
    """One that can be compiled, unlike the host's own."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@pytest.mark.parametrize(
    ("kind", "recomputes"),
    [
        ("Qwen2", False),
        pytest.param("Qwen2", True, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", False, marks=pytest.mark.slow),  # whose load is counted on the way
        pytest.param("Qwen3Moe", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_is_one_graph(
    write_checkpoint: Callable[..., Path],
    tiny_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    recomputes: bool,
) -> None:
    import transformers
    from torch._dynamo.utils import counters

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = tiny_config | (experts if kind == "Qwen3Moe" else {})
    folder = write_checkpoint(getattr(transformers, f"{kind}Config")(**config))
    Policy = adamw_policy(getattr(transformers, f"{kind}ForCausalLM"), lr=1e-2)

    possible = choice.Implementation(attend, lambda call, device: None)
    monkeypatch.setitem(choice.IMPLEMENTATIONS, "per_sequence", possible)
    monkeypatch.setattr(block_compiler, "backend", "eager")
    torch.compiler.reset()
    counters.clear()
    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
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


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def flex_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can train where the inductor has no part in it."""

    def why_not(name: str, *call: Any) -> str | None:  # which has no float64
        wanted = "per_sequence" if torch.float64 in call else "flex_attention"
        return None if name == wanted else "another is wanted"

    monkeypatch.setattr(choice, "why_not", why_not)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(block_compiler, "backend", "eager")


BATCHES = (150, 1, 49), (7, 93, 50, 50), (300, 20), (5, 200, 71)
"""Lengths: two batches of 200 tokens, and two of other numbers."""


def policy_of(num_windows: int) -> Any:
    """Two blocks; with 2 windows, one of them attends to 16 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        pass

    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=3 - num_windows,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Policy(config)


def gradients(policy: Any, lengths: tuple[int, ...]) -> Tensor:
    batch = {name: tensor.to(policy.lm_head.weight.device) for name, tensor in packed_batch(lengths).items()}
    hidden_TH = policy.hidden_states(batch)
    hidden_TH.to(torch.promote_types(hidden_TH.dtype, torch.float32)).square().mean().backward()
    found = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    policy.zero_grad()
    return found


def graphs_by_batch(num_windows: int, device: str, recomputes: Any) -> list[int]:
    """How many were made for each of ``BATCHES``, whose gradients are right and in whose blocks no graph breaks."""
    from torch._dynamo.utils import counters

    exact = keep_float64(policy_of(num_windows).double())
    policy = policy_of(num_windows).to(device).train()
    options = Sharding(compute_dtype="bfloat16", compile=True, activation_checkpointing=recomputes)
    shard(policy, options, torch.device(device), lambda: None, size=1)
    graphs = []
    for lengths in BATCHES:
        with torch.compiler.set_stance("force_eager"):
            uncompiled = gradients(policy, lengths)
        counters.clear()
        found = gradients(policy, lengths)
        assert not counters["graph_break"]
        graphs.append(counters["stats"]["unique_graphs"])
        assert_as_accurate(found, uncompiled, gradients(exact, lengths))
    return graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@pytest.mark.usefixtures("nothing_compiled", "flex_on_the_host")
@pytest.mark.parametrize(("num_windows", "recomputes"), [(1, "selective"), (2, False)])
def test_masks_are_made_before_a_block_and_do_not_compile_it_again(num_windows: int, recomputes: Any) -> None:
    graphs = graphs_by_batch(num_windows, "cpu", recomputes)
    assert graphs == [num_windows, 0, num_windows, 0], "for each window, and again for all other numbers of tokens"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("num_windows", "recomputes"), [(1, True), (1, "selective"), (2, False)])
def test_a_compiled_block_is_one_graph_by_the_attention_of_the_gpu(num_windows: int, recomputes: Any) -> None:
    first, *_, last = graphs_by_batch(num_windows, "cuda", recomputes)
    assert (first, last) == (num_windows, 0)


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@pytest.mark.timeout(900)  # the compiler takes minutes where ten others want the processor
@pytest.mark.parametrize(
    ("place", "recomputes"),
    [
        pytest.param(Place("cpu", 1), False, marks=pytest.mark.slow),
        pytest.param(Place("cpu", 2), "selective", marks=pytest.mark.slow),
        *(
            pytest.param(Place("cuda", 1), recomputes, marks=pytest.mark.gpu)
            for recomputes in (False, True, "selective")
        ),
        *(pytest.param(Place("cuda", 2), recomputes, marks=pytest.mark.multigpu) for recomputes in (False, True)),
        pytest.param(Place("cuda", 2), "selective", marks=pytest.mark.multigpu),
    ],
)
def test_compiled_blocks_train_as_plain_bfloat16_does(
    build: Build, place: Place, recomputes: Any, policy: Any, qwen2_folder: Path
) -> None:
    options = {"compute_dtype": "bfloat16", "activation_checkpointing": recomputes, "compile": True}
    for seed in range(3):
        engine = build(place.workers, place.device, **options)
        truth = truth_of(policy, qwen2_folder, place.device, torch.bfloat16)
        batch = packed_batch(seed=seed)
        truth.assert_step(engine.train_batch(batch, policy_gradient), batch, policy_gradient)
    assert engine.state_dict().keys() == truth.exact.weights().keys()
