"""TRL's own trainers with and without rlcore: the same losses, gradients and statistics, by its real package."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError
from tests.accuracy import assert_as_accurate, assert_within_rounding
from tests.engines.sampling.vllm.server import Server
from tests.engines.sampling.vllm.stock import environment

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL warns of what it will change
trl = pytest.importorskip("trl", reason="TRL is not installed: make test-slow, or pip install '.[trl]'")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns of a vLLM that is newer than it
    from trl.generation.vllm_client import VLLMClient
    from trl.trainer.utils import FusedCausalLMOutput

    from rlcore.integrations.trl import RlcoreGRPOTrainer, _use_plan, accelerate_trl, weights_by_rlcore

PROMPT, COMPLETION = 6, 9
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "two-sided": {"delta": 1.5, "temperature": 0.7},
    "entropy": {"entropy_coef": 0.01, "top_entropy_quantile": 0.5},
    "off-policy": {"off_policy_mask_threshold": 0.01},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    letters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz +="]
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(letters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


Make = Callable[..., Any]
OF_ANY_TRAINER: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "model_init_kwargs": {"dtype": "float32"},
}


@pytest.fixture
def make(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a trainer of a class of TRL."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(cls: Any = trl.GRPOTrainer, **options: Any) -> Any:
        common = {
            **OF_ANY_TRAINER,
            "output_dir": str(tmp_path / "out"),
            "num_generations": 4,
            "max_completion_length": COMPLETION,
        }
        config = trl.RLOOConfig if issubclass(cls, trl.RLOOTrainer) else trl.GRPOConfig
        return cls(
            model=str(folder),
            reward_funcs=_reward,
            args=config(**common | options),
            train_dataset=datasets.Dataset.from_dict({"prompt": [f"{a} + {b} =" for a in "abcd" for b in "wxyz"]}),
            processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder),
        )

    with contextlib.ExitStack() as stack:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # accelerate may leave these
            stack.callback(_restore, name, os.environ.get(name))
        yield make


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


# ------------------------------------------------------------------------------------- one loss, three heads


def inputs() -> dict[str, Tensor]:
    """Return what TRL's trainer has scored: eight completions, padded."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 3, 7, 1, 9, 8, 5, 2])
    logprobs = -3.3 + 0.3 * torch.randn(3, 8, COMPLETION, generator=generator)
    mask = (torch.arange(COMPLETION) < lengths[:, None]).int()
    return {
        "prompt_ids": torch.randint(2, 31, (8, PROMPT), generator=generator),
        "prompt_mask": (torch.arange(PROMPT) >= torch.arange(8)[:, None] % 3).int(),
        "completion_ids": torch.randint(2, 31, (8, COMPLETION), generator=generator),
        "completion_mask": mask,
        "advantages": torch.randn(8, generator=generator),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": logprobs[0],
        "ref_per_token_logps": logprobs[1],
        "sampling_per_token_logps": logprobs[2],
    }


def results(trainer: Any) -> tuple[list[Tensor], dict[str, list[float]]]:
    """Return the loss with the gradients of all weights, and TRL's statistics."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    wide = next(trainer.model.parameters()).dtype == torch.float64
    batch = {name: value.double() if wide and value.is_floating_point() else value for name, value in inputs().items()}
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    return [loss.reshape(1), *gradients], dict(trainer._metrics["train"])


def use_all_logits(model: Any, temperature: float = 1.0) -> None:
    """Let a model of TRL's answer from its own logits, by code of its own."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **options: Any) -> Any:
        if not fused_lm_head:
            return original(*args, labels=labels, **options)
        assert labels is not None
        plain, following = original(*args, **options), labels[:, 1:]
        logits, is_scored = plain.logits[:, :-1] / temperature, following != -100
        every = logits.log_softmax(-1)
        logprob = every.gather(-1, following.clamp(min=0)[..., None]).squeeze(-1)
        numbers = {
            "log_probs": logprob,
            "entropy": -(every.exp() * every).sum(-1),
            "log_sum_sq_probs": (2 * every.detach()).exp().sum(-1).log(),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": logits.argmax(-1) == following,
        }
        masked = {name: values.masked_fill(~is_scored, 0) for name, values in numbers.items()}
        return FusedCausalLMOutput(**masked, label_mask=is_scored, aux_loss=getattr(plain, "aux_loss", None))

    model.forward = forward


@pytest.mark.parametrize("name", LOSSES)
def test_losses_gradients_and_statistics_are_trls(make: Make, name: str) -> None:
    options = LOSSES[name]
    ours, theirs, exact = accelerate_trl(make(**options)), make(**options), make(**options)
    exact.model.double()
    use_all_logits(exact.model, exact.temperature)
    (found, told), (reference, expected), (truth, known) = results(ours), results(theirs), results(exact)
    assert_as_accurate(found, reference, truth, what=name)
    assert told.keys() == expected.keys() == known.keys()
    for key, (value,) in known.items():
        # Of numbers up to 4 (nats; ratios near 1): 64 products a logit, 31 logits, the mean over 53 tokens.
        assert_within_rounding(torch.tensor(told[key]), torch.tensor([value]), terms=64 + 31 + 53, magnitude=4.0)


# -------------------------------------------------------------------------------------------- whole programs


@pytest.mark.parametrize("cls", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_training_is_trls_and_leaves_the_optimizer_on_the_device(make: Make, cls: Any) -> None:
    """As near to TRL's as that of a third program, which makes all logits."""
    plain, ours, third = make(cls), accelerate_trl(make(cls)), make(cls)
    use_all_logits(third.model, third.temperature)
    weights = []
    for trainer in (plain, ours, third):
        transformers.set_seed(7)
        trainer.train()
        weights.append([parameter.detach() for parameter in trainer.model.parameters()])
    assert_as_accurate(weights[1], weights[2], [weight.double() for weight in weights[0]])
    for expected, found in zip(plain.state.log_history, ours.state.log_history, strict=True):
        assert found.keys() == expected.keys()
        assert found.get("reward") == expected.get("reward")
    states = list(ours.optimizer.state.values())
    assert states and all(state["exp_avg"].untyped_storage().nbytes() > 0 for state in states)


@pytest.mark.parametrize("offload_optimizer", [True, False])
def test_the_states_of_the_optimizer_are_away_while_completions_are_sampled_unless_they_shall_stay(
    make: Make, offload_optimizer: bool
) -> None:
    trainer = make()
    sampled: list[list[int]] = []
    original = trainer._generate_and_score_completions

    def look(*args: Any) -> Any:
        states = trainer.optimizer.state.values() if trainer.optimizer is not None else []
        sampled.append([state["exp_avg"].untyped_storage().nbytes() for state in states])
        return original(*args)

    trainer._generate_and_score_completions = look
    accelerate_trl(trainer, offload_optimizer=offload_optimizer).train()
    assert sampled[0] == [] and all(sizes and any(sizes) != offload_optimizer for sizes in sampled[1:])


def test_a_checkpoint_of_the_subclass_is_read_by_trls_trainer(make: Make, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    ours = make(RlcoreGRPOTrainer, **options)
    ours.train()
    resumed = make(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert resumed.state.global_step == 3
    weights = [parameter.detach() for parameter in ours.model.parameters()]
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert resumed.state.log_history[1]["loss"] == ours.state.log_history[1]["loss"]


def test_adapters_train_as_with_trl(make: Make) -> None:
    peft = pytest.importorskip("peft")
    trained = []
    for accelerate in (lambda trainer: trainer, accelerate_trl, _with_all_logits):
        trainer = make()
        base = copy.deepcopy(trainer.model)
        adapted = trl.GRPOTrainer(
            model=base,
            reward_funcs=_reward,
            args=trainer.args,
            train_dataset=trainer.train_dataset,
            processing_class=trainer.processing_class,
            peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4),
        )
        transformers.set_seed(7)
        accelerate(adapted).train()
        trained.append([weight.detach() for weight in adapted.model.parameters() if weight.requires_grad])
    plain, ours, third = trained
    assert_as_accurate(ours, third, [weight.double() for weight in plain])


def _with_all_logits(trainer: Any) -> Any:
    model = trainer.model.get_base_model()
    use_all_logits(model, trainer.temperature)
    return trainer


# ------------------------------------------------------------------------------------------------- refusals


def test_another_object_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"accelerate_trl\(\) takes a GRPOTrainer, .* or SFTTrainer, got str"):
        accelerate_trl("trainer")  # type: ignore[type-var]
    with pytest.raises(
        InvalidInputError, match=r"accelerate_trl\(\) takes True or False as offload_optimizer, got 'yes'"
    ):
        accelerate_trl("trainer", offload_optimizer="yes")  # type: ignore[type-var]


def test_a_server_that_takes_weights_of_trl_is_refused_and_the_trainer_stays_as_it_was(make: Make) -> None:
    trainer = make()
    client = SimpleNamespace(communicator="a group of NCCL")
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(mode="server", vllm_client=client)
    before = vars(trainer).copy(), trainer.model.forward
    with pytest.raises(UnsupportedError, match=r'accelerate_trl\(\) with vllm_mode="server".*docs/trl\.md'):
        accelerate_trl(trainer)
    assert (vars(trainer), trainer.model.forward) == before


@pytest.mark.parametrize("config", [None, {"backend": "nccl"}])
def test_a_server_with_another_weight_transfer_is_named_with_what_to_start_it_with(config: Any) -> None:
    client: Any = VLLMClient.__new__(VLLMClient)
    client.base_url, client.get_server_info = "http://there", lambda: {"weight_transfer_config": config}
    original = VLLMClient.init_communicator
    refused = pytest.raises(
        UnsupportedError, match=r"server at http://there.* restart it with --weight-transfer-config"
    )
    with refused, weights_by_rlcore():
        client.init_communicator(device="cpu")
    assert VLLMClient.init_communicator is original


def test_vllm_of_this_process_writes_text_only_where_strings_stop_it() -> None:
    for given, expected in (
        ({"ignore_eos": True}, {"detokenize": False, "ignore_eos": True}),
        ({"stop": ["="]}, {"stop": ["="]}),
        ({"detokenize": True}, {"detokenize": True}),
    ):
        generation = SimpleNamespace(mode="colocate", generation_kwargs=given)
        _use_plan(generation)
        assert generation.generation_kwargs == expected


WITH_VLLM = {"use_vllm": True, "use_cpu": not torch.cuda.is_available(), "learning_rate": 1e-2}
"""The trainer is where vLLM is, and its steps change the log-probs much."""


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_server_samples_with_the_weights_of_the_trainer(make: Make, folder: Path, tmp_path: Path) -> None:
    """It does by TRL's own figure, as in the test below."""
    installed = tmp_path / "installed"
    installed.mkdir()
    options = ["--logprobs-mode", "processed_logprobs", "--max-model-len", "32"]
    server = Server(folder, tmp_path / "log", environment(installed), *options)
    with contextlib.ExitStack() as ended:
        ended.callback(server.close)
        server.wait()
        served = {"vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = make(RlcoreGRPOTrainer, **WITH_VLLM, **served)
        trainer.train()
    moved = [line["sampling/sampling_logp_difference/max"] for line in trainer.state.log_history[:-1]]
    assert len(moved) == 3 and max(moved) < 0.02, moved


@pytest.mark.vllm
def test_vllm_in_the_same_process_samples_with_the_weights_of_the_trainer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TRL's own figure: the difference of log-probs of sampler and trainer."""
    monkeypatch.setenv("RLCORE_VLLM_PLAIN_WEIGHTS", "1")
    options = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 32}
    trainer = make(RlcoreGRPOTrainer, **WITH_VLLM, **options)
    trainer.train()
    moved = [line["sampling/sampling_logp_difference/max"] for line in trainer.state.log_history[:-1]]
    assert len(moved) == 3 and max(moved) < 0.02, moved
