"""TRL's trainers of data that are there already (SFT, DPO, KTO) with and without rlcore, by its real package."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accuracy import assert_as_accurate, assert_within_rounding

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL warns of what it will change
trl = pytest.importorskip("trl", reason="TRL is not installed: make test-slow, or pip install '.[trl]'")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns of a vLLM that is newer than it
    from rlcore.integrations.trl import accelerate_trl
    from tests.integrations.test_trl import OF_ANY_TRAINER, _restore, folder, use_all_logits  # noqa: F401  # a fixture

PROMPTS = [f"{a} + {b} =" for a in "abcd" for b in "wxyz"]
ANSWERS = [("sum " * (1 + n % 3)).strip() for n in range(16)]
OTHERS = [("no " * (1 + n % 4)).strip() for n in range(16)]
LONGEST = 16
"""No completion has more tokens, its end included."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("SFT", {}),
    "sft dft": ("SFT", {"loss_type": "dft"}),
    "sft on prompts": ("SFT", {"completion_only_loss": False, "gradient_accumulation_steps": 2}),
    "sft smoothed": ("SFT", {"label_smoothing_factor": 0.1}),
    "sft packed": ("SFT", {"packing": True, "max_length": 48}),
    "dpo": ("DPO", {}),
    "dpo ipo": ("DPO", {"loss_type": "ipo", "beta": 0.3}),
    "dpo two losses": ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "wpo": ("DPO", {"use_weighting": True}),
    "ld-dpo": ("DPO", {"ld_alpha": 0.4}),
    "dpo precomputed": ("DPO", {"precompute_ref_log_probs": True}),
    "kto": ("KTO", {}),
    "apo": ("KTO", {"loss_type": "apo_zero_unpaired"}),
}
Make = Callable[..., Any]


def rows(kind: str) -> Any:
    if kind == "SFT":
        columns: dict[str, list[Any]] = {"prompt": PROMPTS, "completion": ANSWERS}
    elif kind == "DPO":
        columns = {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": OTHERS}
    else:
        columns = {"prompt": PROMPTS, "completion": ANSWERS, "label": [n % 2 == 0 for n in range(16)]}
    return datasets.Dataset.from_dict(columns)


@pytest.fixture
def make(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a trainer of a kind, on a model whose weights are not those of its reference."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def make(kind: str, *, noise: float = 0.05, model: str = "", **options: Any) -> Any:
        common = OF_ANY_TRAINER | {"output_dir": str(tmp_path / "out"), "max_length": 64}
        peft_config = options.pop("peft_config", None)
        trainer = getattr(trl, f"{kind}Trainer")(
            model=model or str(folder),
            args=getattr(trl, f"{kind}Config")(**common | options),
            train_dataset=rows(kind),
            processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder),
            **({} if peft_config is None else {"peft_config": peft_config}),
        )
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
        return trainer

    with contextlib.ExitStack() as stack:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # accelerate may leave these
            stack.callback(_restore, name, os.environ.get(name))
        yield make


def results(trainer: Any) -> tuple[list[Tensor], dict[str, list[float]]]:
    """Return the loss of the first batch with the gradients of all weights, and TRL's statistics."""
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    transformers.set_seed(5)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
    return [loss.reshape(1), *gradients], dict(trainer._metrics["train"])


def in_float64(trainer: Any) -> Any:
    """Let the trainer compute with all logits."""
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            causal = model.double().get_base_model() if hasattr(model, "get_base_model") else model.double()
            use_all_logits(causal)
    return trainer


def assert_same_program(make: Make, kind: str, **options: Any) -> None:
    ours, theirs = accelerate_trl(make(kind, **options)), make(kind, **options)
    exact = in_float64(make(kind, **options))
    (found, told), (reference, expected), (truth, known) = results(ours), results(theirs), results(exact)
    assert_as_accurate(found, reference, truth)
    assert told.keys() == expected.keys() == known.keys()
    for key, (value,) in known.items():
        # Of sums over a completion of numbers up to 4 nats, by which a ratio of KTO or WPO is wrong, too.
        limit = {"terms": 64 + 31 + 8 * LONGEST, "magnitude": 4.0 * LONGEST * max(1.0, abs(value))}
        assert_within_rounding(torch.tensor(told[key]).float(), torch.tensor([float(value)]), what=key, **limit)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_statistics_are_trls(make: Make, case: str) -> None:
    kind, options = CASES[case]
    assert_same_program(make, kind, **options)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_adapters_have_trls_gradients(make: Make, kind: str) -> None:
    """The reference of DPO and KTO is then the model without them."""
    peft = pytest.importorskip("peft")
    config = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False}
    torch.manual_seed(1)
    with torch.random.fork_rng():
        assert_same_program(_seeded(make), kind, peft_config=peft.LoraConfig(**config))


def _seeded(make: Make) -> Make:
    def seeded(*args: Any, **options: Any) -> Any:
        torch.manual_seed(1)  # the adapters' weights are random
        return make(*args, **options)

    return seeded


def test_experts_are_balanced_as_by_trl(make: Make, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=31,
        hidden_size=64,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    transformers.PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(tmp_path / "moe")
    plain = {"dtype": "float32", "experts_implementation": "eager"}  # the others have no float64
    assert_same_program(make, "SFT", model=str(tmp_path / "moe"), router_aux_loss_coef=0.1, model_init_kwargs=plain)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_training_is_trls(make: Make, kind: str) -> None:
    """Without Adam, whose steps are as long where a gradient is nothing but rounding."""
    options = {"optim": "sgd", "learning_rate": 0.1}
    plain, ours = make(kind, **options), accelerate_trl(make(kind, **options))
    weights = []
    for trainer in (plain, ours, in_float64(make(kind, **options))):
        transformers.set_seed(7)
        trainer.train()
        weights.append([parameter.detach() for parameter in trainer.model.parameters()])
    assert_as_accurate(weights[1], weights[0], weights[2])
    for expected, found in zip(plain.state.log_history, ours.state.log_history, strict=True):
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_in_bfloat16_a_model_and_its_reference_of_the_same_weights_agree(make: Make, kind: str) -> None:
    """Both run under autocast, so that before the first step no reward is anything but 0."""
    trainer = accelerate_trl(make(kind, noise=0.0, bf16=True, max_steps=1))
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0.0
    assert math.isfinite(first["loss"])


def test_evaluation_asks_the_same_head(make: Make) -> None:
    for kind in ("SFT", "DPO"):
        plain, ours = make(kind), accelerate_trl(make(kind))
        found, expected = ours.evaluate(rows_of(ours)), plain.evaluate(rows_of(plain))
        names = [name for name in expected if name.endswith(("loss", "entropy", "accuracy"))]
        for name in names:
            limit = {"terms": 64 + 31 + 16 * LONGEST, "magnitude": 8.0}  # both sides are rounded
            assert_within_rounding(torch.tensor(found[name]), torch.tensor(expected[name]), what=name, **limit)
        assert len(names) >= 3


def rows_of(trainer: Any) -> Any:
    """Return the data as the trainer has prepared them."""
    return trainer.train_dataset
