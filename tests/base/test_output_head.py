"""The output head of a transformers model, against the logits of the model itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import UnsupportedError
from rlcore.nn import HuggingFaceTrainModule
from tests.accuracy import assert_within_rounding
from tests.base.output_heads import NOT_MADE, REFUSED, found_head, model_classes
from tests.conftest import ROOT

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
    "nanochat": {"final_logit_softcapping": 0.5},
    "minicpm3": {  # which divides the hidden states by hidden_size / dim_model_base
        "dim_model_base": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
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


NORMED: dict[str, Any] = SMALL | {"is_decoder": True, "max_position_embeddings": 32}


def bert_of(folder: Path) -> Any:
    """A class with its folder, whose logits are of a dense layer, an activation and a norm of the hidden states."""
    config = transformers.BertConfig(**NORMED)
    transformers.BertLMHeadModel(config).save_pretrained(folder)
    return type("Policy", (HuggingFaceTrainModule, transformers.BertLMHeadModel), {})


def test_another_head_is_refused_when_the_module_is_made(tmp_path: Path) -> None:
    refused = (
        r"^the output head of Policy is not supported: its logits cannot be shown to be logit_scale \* softcap \* tanh"
        r".* of its decoder's hidden states \(RuntimeError: .*\); override hidden_states\(\) and output_head\(\)"
    )
    policy = bert_of(tmp_path)
    with rlcore.meta_device(), pytest.raises(UnsupportedError, match=refused):
        policy.from_pretrained(tmp_path)


class Normed(transformers.Qwen2ForCausalLM):  # type: ignore[misc,name-defined]
    """Somebody's model, which makes its logits of normed hidden states."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        found = super().forward(input_ids, **options)
        hidden = self.model(input_ids).last_hidden_state
        found.logits = self.lm_head(hidden / hidden.norm(dim=-1, keepdim=True))
        return found


def test_logits_of_another_function_are_refused() -> None:
    module = type("Policy", (HuggingFaceTrainModule, Normed), {})(transformers.Qwen2Config(**SMALL))
    with pytest.raises(UnsupportedError, match=r"hidden states \(they are another function of them\); override"):
        module.output_head()


class Learnt(transformers.Qwen2ForCausalLM):  # type: ignore[misc,name-defined]
    """Somebody's model, whose scale is trained."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        found = super().forward(input_ids, **options)
        found.logits = found.logits * self.scale
        return found


def test_a_scale_that_is_trained_is_refused_whatever_it_is_now() -> None:
    module = type("Policy", (HuggingFaceTrainModule, Learnt), {})(transformers.Qwen2Config(**SMALL))
    with pytest.raises(UnsupportedError, match=r"\(RuntimeError: .*meta.*\); override"):
        module.output_head()


class Shorter(transformers.Qwen2ForCausalLM):  # type: ignore[misc,name-defined]
    """Somebody's model, whose head has rows that fill it up, as that of Inkling has."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        found = super().forward(input_ids, **options)
        found.logits = found.logits[..., :38]
        return found


class Masking(transformers.Qwen2ForCausalLM):  # type: ignore[misc,name-defined]
    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        found = super().forward(input_ids, **options)
        found.logits[..., 38:] = -1e9
        return found


@pytest.mark.parametrize("base", [Shorter, Masking])
def test_rows_of_the_head_that_the_model_drops_are_refused(base: Any) -> None:
    module = type("Policy", (HuggingFaceTrainModule, base), {})(transformers.Qwen2Config(**SMALL))
    with pytest.raises(UnsupportedError, match=r"hidden states \(they are another function of them\); override"):
        module.output_head()


class Around(transformers.Qwen2PreTrainedModel):  # type: ignore[misc,name-defined]
    """A base model around a decoder, which needs the values of a weight."""

    factor = 7.0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.language = transformers.Qwen2Model(config)
        self.image = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor) -> Any:
        output = self.language(inputs_embeds=self.language.embed_tokens(input_ids) + self.image)
        if self.factor != 1:
            output.last_hidden_state = output.last_hidden_state * self.factor
        return output


class AroundLM(transformers.Qwen2PreTrainedModel):  # type: ignore[misc,name-defined]
    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Around(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.dropout = torch.nn.Dropout(0.5)
        self.post_init()

    def get_decoder(self) -> Any:
        return self.model.language

    def get_input_embeddings(self) -> Any:
        return self.model.language.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.dropout(self.model(input_ids).last_hidden_state)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(hidden))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_base_model_that_changes_the_decoders_states_never_stands_for_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = type("Policy", (HuggingFaceTrainModule, AroundLM), {})
    with pytest.raises(UnsupportedError, match=r"\(RuntimeError: .*meta.*\); override"):
        policy(transformers.Qwen2Config(**SMALL)).to(device).output_head()
    monkeypatch.setattr(Around, "factor", 1.0)
    assert policy(transformers.Qwen2Config(**SMALL)).to(device).output_head()[2:4] == (None, 1.0)


def test_dropout_neither_refuses_a_model_nor_draws_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Around, "factor", 1.0)
    module = type("Policy", (HuggingFaceTrainModule, AroundLM), {})(transformers.Qwen2Config(**SMALL))
    module.model.eval()
    modes = [part.training for part in module.modules()]
    before = torch.get_rng_state()
    assert module.output_head().logit_scale == 1.0
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.training for part in module.modules()] == modes
    assert len(set(modes)) == 2


def test_a_module_with_a_head_of_its_own_is_not_asked(tmp_path: Path) -> None:
    class Own(bert_of(tmp_path)):  # type: ignore[misc]
        def output_head(self) -> rlcore.nn.OutputHead:
            return rlcore.nn.OutputHead(self.bert.embeddings.word_embeddings.weight)

    with rlcore.meta_device():
        module = Own.from_pretrained(tmp_path)
    assert module.output_head().weight.is_meta


def test_measuring_leaves_the_module_as_it_is_and_asks_transformers_class() -> None:
    class Derived(HuggingFaceTrainModule, transformers.Gemma2ForCausalLM):
        def forward(self, *args: Any) -> None:
            raise AssertionError("this is another program's")

    config = transformers.AutoConfig.for_model("gemma2", **SMALL, final_logit_softcapping=0.5)
    module = Derived(config)
    before = [(name, id(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    head = module.output_head()
    assert (head.softcap, head.logit_scale) == (0.5, 1.0)
    assert head.weight is module.model.embed_tokens.weight, "tied, as before"
    assert [(name, id(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)] == before
    assert not [name for name, part in module.named_modules() if "forward" in vars(part)]


def test_a_head_of_the_meta_device_is_that_of_the_weights() -> None:
    for model_type in SCALED:
        policy = policy_of(model_type)
        on_meta = type(policy)(policy.config).to("meta")
        found, expected = on_meta.output_head(), policy.output_head()
        assert (found.softcap, found.logit_scale) == (expected.softcap, expected.logit_scale), model_type


def test_a_model_without_an_output_head_is_refused() -> None:
    pytest.importorskip("peft")  # which has its layers looked for

    class Bare(HuggingFaceTrainModule, transformers.Qwen2Model):
        pass

    with pytest.raises(UnsupportedError, match=r"\(get_output_embeddings\(\) gives no module with a weight\)"):
        Bare(transformers.Qwen2Config(**SMALL)).output_head()


@pytest.mark.slow
def test_docs_have_the_heads_of_all_classes() -> None:
    """All that have a formula of their own are measured, and one in eight of the others: a minute for all of them."""
    docs = (ROOT / "docs" / "engines.md").read_text()
    if f"classes of transformers {transformers.__version__}," not in docs:
        pytest.skip(f"docs/engines.md is of another transformers than {transformers.__version__}")
    rows = re.findall(r"^\| `?([^`|]+)`? \| (\d+): ([\w, ]+) \|$", docs, re.MULTILINE)
    classes = model_classes()
    assert sum(int(count) for _, count, _ in rows) == len(classes)
    stated = {name: formula.strip() for formula, _, names in rows for name in names.split(", ") if name in classes}
    bent = [name for name, formula in stated.items() if formula not in (REFUSED, NOT_MADE)]
    others = [name for name in classes if name not in bent]
    assert len(bent) > 10
    chosen = [*bent, *others[::8]]
    found = {name: found_head(name, classes[name]).formula for name in chosen}
    assert found == {name: stated.get(name, "z") for name in chosen}, "run: python -m tests.base.output_heads"
