"""Models whose heads a plan cuts without saying who sums the gradients of their norms are refused, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.parallel_plans import Sizes, why_not_split

pytest.importorskip("transformers.distributed.tensor_parallel", reason="transformers has no such plans")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
GLM = EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
TWO, WITH_EXPERTS = Sizes(tensor=2), Sizes(tensor=2, experts=2)


def reason(kind: str, sizes: Sizes, options: dict[str, Any]) -> str | None:
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**COMMON | options))
    found = why_not_split(model, sizes)
    if found and found.startswith("transformers 5."):
        pytest.skip(found)
    return found


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "path"),
    [
        ("Glm4Moe", WITH_EXPERTS, GLM | {"use_qk_norm": True}, "layers.0.self_attn.q_norm of Glm4MoeModel"),
        ("Cohere", TWO, {"use_qk_norm": True}, "layers.0.self_attn.q_norm of CohereModel"),
        ("Phi", TWO, {"qk_layernorm": True}, "layers.0.self_attn.q_layernorm of PhiModel"),
    ],
)
def test_norms_of_cut_heads_that_a_plan_does_not_name(
    kind: str, sizes: Sizes, options: dict[str, Any], path: str
) -> None:
    assert reason(kind, sizes, options) == (
        f"transformers' plan cuts the heads before {path} and does not name it: each rank would train it with the "
        "gradient of its own heads"
    )


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        ("Glm4Moe", WITH_EXPERTS, GLM),  # without norms of heads
        ("Cohere", TWO, {}),
        ("Phi", TWO, {}),
        ("Qwen3", TWO, {"head_dim": 8}),  # the plan names them
        ("Qwen3Moe", WITH_EXPERTS, EXPERTS | {"num_experts": 4}),
        ("Olmo2", TWO, {}),  # norms of all heads, which are gathered
        ("DeepseekV3", WITH_EXPERTS, GLM | MLA),  # norms before the heads
    ],
)
def test_other_models_are_taken(kind: str, sizes: Sizes, options: dict[str, Any]) -> None:
    assert reason(kind, sizes, options) is None
