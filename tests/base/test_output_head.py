"""The output head of a transformers model, against the logits of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.nn import HuggingFaceTrainModule
from tests.accuracy import assert_within_rounding

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,  # logits that a softcap bends
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SCALED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gpt_neox": {},
    "phi": {},  # with a bias
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 0.5},
    "hyperclovax": {"logits_scaling": 4.0},  # by which it multiplies
    "falcon_h1": {"lm_head_multiplier": 0.25, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 4},
    "gemma4": {  # which may take images too
        "text_config": SMALL | {"final_logit_softcapping": 0.5, "global_head_dim": 8},
        "vision_config": None,
        "audio_config": None,
    },
}
"""Model types, by what scales their logits."""


def policy_of(model_type: str) -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = transformers.AutoConfig.for_model(model_type, **SMALL | SCALED[model_type])
    base = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = type("Policy", (HuggingFaceTrainModule, base), {})(config).eval()
        if (bias := policy.get_output_embeddings().bias) is not None:
            torch.nn.init.normal_(bias)
        return policy


@pytest.mark.parametrize("model_type", SCALED)
def test_it_gives_the_logits_of_the_model(model_type: str) -> None:
    policy = policy_of(model_type)
    hidden: list[torch.Tensor] = []
    policy.get_decoder().register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state))
    with torch.no_grad():
        found = policy(input_ids=torch.arange(1, 9)[None]).logits
    head, states = policy.output_head(), hidden[0].detach().double()
    weight = head.weight.detach().double()
    bias = torch.zeros(len(weight)) if head.bias is None else head.bias.detach()
    exact = states @ weight.T + bias.double()
    if head.softcap is not None:
        exact = head.softcap * torch.tanh(exact / head.softcap)
    magnitude = states.abs() @ weight.abs().T + bias.abs()
    assert_within_rounding(
        found,
        exact * head.logit_scale,
        terms=states.shape[-1] + 1 + 6,  # the products, the bias; the softcap and the scale
        magnitude=magnitude * head.logit_scale,
        what=model_type,
    )
