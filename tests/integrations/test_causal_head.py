from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.errors import UnsupportedError
from rlcore.integrations.causal_head import IGNORED, CausalHead
from rlcore.integrations.trl_vllm import named_weights
from tests.accuracy import assert_as_accurate, assert_same_bits

transformers = pytest.importorskip("transformers")
PEFT_WARNS = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**shape, **heads)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=dtype)


def scored(model: Any, head: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Return log-probs, entropies, and the gradients of their sum of every parameter of the model."""
    hidden = model.base_model(ids).last_hidden_state
    logprob, entropy = head(hidden, labels, with_entropy=True)
    gradients = torch.autograd.grad((logprob + entropy).sum(), list(model.parameters()), materialize_grads=True)
    return [logprob, entropy, *gradients]


def by_logits(model: Any, temperature: float) -> Any:
    def head(hidden: torch.Tensor, labels: torch.Tensor, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.lm_head(hidden)
        if cap := getattr(model.config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        every = (logits / temperature).log_softmax(-1)
        is_scored = labels != IGNORED
        logprob = every.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return logprob.where(is_scored, 0.0), (-(every.exp() * every).sum(-1)).where(is_scored, 0.0)

    return head


@pytest.mark.parametrize("family", ["Qwen2", "Gemma2"])
def test_scores_are_those_of_the_models_logits_and_so_are_gradients(family: str) -> None:
    """Gemma 2 has a softcap."""
    model, exact = model_of(family), model_of(family, torch.float64)
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(2, 40, (3, 7))
    labels = torch.where(torch.rand(3, 7) < 0.3, IGNORED, torch.randint(2, 40, (3, 7)))
    found = scored(model, CausalHead(model, temperature=0.7), ids, labels)
    plain = scored(model, by_logits(model, 0.7), ids, labels)
    truth = scored(exact, by_logits(exact, 0.7), ids, labels)
    assert all((tensor[labels == IGNORED] == 0).all() for tensor in found[:2])
    for part in (slice(0, 1), slice(1, 2), slice(2, None)):
        assert_as_accurate(found[part], plain[part], truth[part])


def test_a_batch_without_a_label_gives_zeros_and_gradients_of_zero() -> None:
    model = model_of("Qwen2")
    ids = torch.randint(2, 40, (2, 5))
    found = scored(model, CausalHead(model), ids, torch.full((2, 5), IGNORED))
    assert all(bool((tensor == 0).all()) for tensor in found)


def test_autocast_and_float32_choose_the_dtype_of_the_product() -> None:
    model = model_of("Qwen2")
    labels = torch.randint(2, 40, (2, 6))
    hidden = torch.randn(2, 6, 32)
    wide, rounded, kept = CausalHead(model), CausalHead(model), CausalHead(model, in_float32=True)
    with torch.no_grad():
        exact = wide(hidden, labels, with_entropy=False).logprob
        with torch.autocast("cpu", torch.bfloat16):
            low = rounded(hidden, labels, with_entropy=False).logprob
            assert_same_bits(kept(hidden, labels, with_entropy=False).logprob, exact)
        model.lm_head.weight.copy_(model.lm_head.weight.bfloat16())
        of_rounded = wide(hidden.bfloat16().float(), labels, with_entropy=False).logprob
    assert low.dtype == torch.float32 and not torch.equal(low, exact)
    assert (low - of_rounded).abs().max() < (low - exact).abs().max()


@PEFT_WARNS
def test_an_adapter_on_the_head_is_refused() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model_of("Qwen2"), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(UnsupportedError, match=r"an adapter on the output head .*take it out of target_modules"):
        CausalHead(adapted.get_base_model())


def test_a_model_whose_logits_are_something_else_is_refused_and_stays_as_it_was() -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertLMHeadModel(BertConfig(vocab_size=11, is_decoder=True, **sizes))
    forward = model.forward
    with pytest.raises(
        UnsupportedError, match="the output head of BertLMHeadModel is not supported: its log"
    ) as caught:
        CausalHead(model)
    assert caught.value.__notes__ == [
        "The model is as it was: without rlcore's call the trainer scores it by its own head."
    ]
    assert model.forward == forward


@PEFT_WARNS
def test_weights_have_the_names_of_checkpoints_and_those_of_adapters_are_left_out() -> None:
    peft = pytest.importorskip("peft")
    plain = model_of("Qwen2")
    expected = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    found = named_weights(peft.get_peft_model(plain, config))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_same_bits(tensor.detach(), expected[name].detach(), name)
