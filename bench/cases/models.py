"""Language models for the cases: Qwen of known shapes with random weights, and what they are given."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.errors import MissingDependencyError
from rlcore.meta import meta_device
from rlcore.nn import HuggingFaceTrainModule
from rlcore.tensor_data import dtype_name

_STD = 0.02
"""The deviation of random weights, as transformers starts them."""
_FILE_BYTES = 4 << 30
LEARNING_RATE = 1e-6


def transformers_class(name: str) -> Any:
    """Raises MissingDependencyError without transformers."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="this case", extra="hf") from error
    return getattr(transformers, name)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder of the Qwen family: grouped-query attention, a gated MLP or experts."""

    name: str
    hidden: int
    inner: int
    """The width of the MLP, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_size: int = 128
    is_tied: bool = False
    experts: int = 0
    """0: the MLP is dense."""

    @property
    def q(self) -> int:
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def mlps(self) -> int:
        """The number of MLPs in each layer."""
        return max(1, self.experts)

    @property
    def num_multiplied(self) -> int:
        """Parameters of a dense one that take part in a product for each token: the head does, the embedding not."""
        attention = 2 * self.hidden * (self.q + self.kv)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary

    @property
    def experts_of_token(self) -> int:
        return min(_ACTIVE_EXPERTS, self.experts)

    def divided(self, by: int) -> ModelShape:
        """Divide every width by ``by``; layers, heads and experts stay as many."""
        widths = {name: getattr(self, name) // by for name in ("vocabulary", "hidden", "inner", "head_size")}
        return replace(self, **widths)

    @property
    def class_name(self) -> str:
        """The name of the model's class in transformers."""
        return "Qwen3MoeForCausalLM" if self.experts else "Qwen2ForCausalLM"

    def config(self, **options: Any) -> Any:
        """Raises MissingDependencyError without transformers."""
        of_experts = {
            "intermediate_size": _ACTIVE_EXPERTS * self.inner,
            "moe_intermediate_size": self.inner,
            "head_dim": self.head_size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_of_token,
        }
        return transformers_class(self.class_name.replace("ForCausalLM", "Config"))(
            architectures=[self.class_name],
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.is_tied,
            max_position_embeddings=32_768,
            **(of_experts if self.experts else {"intermediate_size": self.inner}),
            **options,
        )


_ACTIVE_EXPERTS = 8
"""Experts that each token has."""

QWEN_0_5B = ModelShape("qwen2-0.5b", 896, 4864, 24, 14, 2, 151_936, head_size=64, is_tied=True)
QWEN_1_5B = ModelShape("qwen2.5-1.5b", 1536, 8960, 28, 12, 2, 151_936, is_tied=True)
QWEN_7B = ModelShape("qwen2.5-7b", 3584, 18_944, 28, 28, 4, 152_064)
QWEN_30B_A3B = ModelShape("qwen3-30b-a3b", 2048, 768, 48, 32, 4, 151_936, experts=128)
TINY = ModelShape("qwen2-tiny", 128, 512, 2, 2, 2, 512, head_size=64, is_tied=True)
"""Where the device is a host."""
TINY_EXPERTS = ModelShape("qwen3-moe-tiny", 128, 64, 2, 4, 2, 512, head_size=32, experts=16)


class _DrawnTensor:
    """One tensor, whose elements are drawn when they are read; equal for everybody who reads it."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> None:
        self._name, self._shape, self._dtype, self._device_type = name, shape, dtype, device_type

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, box: Any) -> Tensor:
        at: dict[str, Any] = {"device": self._device_type, "dtype": self._dtype}
        if self._name.endswith("norm.weight"):
            return torch.ones(self._shape, **at)[box]
        if self._name.endswith("bias"):
            return torch.zeros(self._shape, **at)[box]
        generator = torch.Generator(self._device_type).manual_seed(zlib.crc32(self._name.encode()))
        return torch.empty(self._shape, **at).normal_(std=_STD, generator=generator)[box]


def drawn(module: torch.nn.Module, dtype: torch.dtype, device_type: str) -> dict[str, Any]:
    """Return weights of every parameter of a module, to be read a slice at a time as from a file."""
    return {
        name: _DrawnTensor(name, tuple(parameter.shape), dtype, device_type)
        for name, parameter in module.named_parameters()
    }


def policy_class(shape: ModelShape = TINY) -> Any:
    """Return the class of trainers of such a model; raises MissingDependencyError without transformers."""

    class RandomPolicy(HuggingFaceTrainModule, transformers_class(shape.class_name)):  # type: ignore[misc]
        """Learns by AdamW; ``weights`` is the folder that they are read from, or the dtype that they are drawn in."""

        weights: Path | torch.dtype
        device_type: str
        adam_options: Mapping[str, Any] = {"fused": True}

        def materialization_source(self) -> Any:
            weights = self.weights
            return weights if isinstance(weights, Path) else drawn(self, weights, self.device_type)

        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, **self.adam_options)

        def reset_peak(self) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.reset_peak_memory_stats()

    return RandomPolicy


def policy(
    shape: ModelShape, weights: Path | torch.dtype, device_type: str, cls: Any = None, dtype: torch.dtype | None = None
) -> Any:
    """Return one on the meta device, of ``policy_class(shape)`` or of a class that was derived from it."""
    with meta_device():
        made = (cls or policy_class(shape))._from_config(shape.config(), dtype=dtype)
    made.weights, made.device_type = weights, device_type
    return made


def learner(folder: Path | str, **options: Any) -> Any:
    """Return a Qwen2 on the meta device whose weights are in ``folder``; ``options`` are those of its AdamW.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    with meta_device():
        made = policy_class().from_pretrained(folder)
    made.weights, made.adam_options = Path(folder), options
    return made


# ------------------------------------------------------------------------------------------ what they are given


@dataclass(frozen=True, slots=True)
class Load:
    """A model, and the prompts that it answers and learns from."""

    model: ModelShape
    dtype: torch.dtype
    prompts: int
    samples: int
    """Completions of each prompt."""
    prompt_tokens: int
    new_tokens: int
    """At most; lengths are drawn from a long tail below it."""

    @property
    def params(self) -> dict[str, int | float | str]:
        shown = ("prompts", "samples", "prompt_tokens", "new_tokens")
        counts = {name: getattr(self, name) for name in shown}
        return {"model": self.model.name, **counts, "dtype": dtype_name(self.dtype)}

    def prompt_ids(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        shape = self.prompts, self.prompt_tokens
        found: list[list[int]] = torch.randint(self.model.vocabulary, shape, generator=generator).tolist()
        return found

    def lengths(self) -> list[int]:
        """Return the new tokens of each prompt: most are short, one is the longest."""
        return [max(2, round(self.new_tokens * 0.5 ** (number % 4))) for number in range(self.prompts)]

    def train_batch(self) -> dict[str, Tensor]:
        """Return what ``rlcore.collate`` makes of completions of these lengths, with random tokens."""
        generator = torch.Generator().manual_seed(1)
        rows, longest = self.prompts * self.samples, self.prompt_tokens + self.new_tokens
        ends = torch.tensor(self.lengths()).repeat_interleave(self.samples)[:, None] + self.prompt_tokens
        positions = torch.arange(longest)[None]
        attention_mask = positions < ends
        vocabulary = self.model.vocabulary
        return {
            "input_ids": torch.randint(vocabulary, (rows, longest), generator=generator) * attention_mask,
            "attention_mask": attention_mask,
            "loss_mask": attention_mask & (positions >= self.prompt_tokens),
            "old_logprobs": torch.full((rows, longest), -float(torch.tensor(vocabulary).log())),
            "advantages": torch.randn(rows, generator=generator),
        }


def load_on(device: Device) -> Load:
    """Raises MissingDependencyError without transformers."""
    transformers_class("Qwen2Config")
    if device.spec.is_host:
        return Load(TINY, torch.float32, 4, 4, 16, 24)
    return Load(QWEN_0_5B, torch.bfloat16, 16, 8, 128, 64)


def packed_batch(vocabulary: int, lengths: list[int], seed: int) -> dict[str, Tensor]:
    """Return packed sequences of these lengths, of random tokens, to train on."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return {
        "input_ids": torch.randint(vocabulary, (total,), generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "old_logprobs": torch.full((total,), -float(torch.tensor(vocabulary).log())),
        "advantages": torch.randn(total, generator=generator),
    }


class Folder:
    """A model folder that is removed by ``close``."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: Device) -> None:
        """Draw the numbers on ``device``: half a billion take a host many seconds."""
        self._folder = tempfile.TemporaryDirectory(prefix="rlcore-bench-")
        self.path = Path(self._folder.name)
        with device.torch_device:
            model = transformers_class(shape.class_name)._from_config(shape.config(), dtype=dtype)
        self.weights = drawn(model, dtype, device.type)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[name][...])
        # A whole large model in one file could not be mapped into the memory of a small machine.
        model.save_pretrained(self.path, max_shard_size=_FILE_BYTES)
        del model
        device.memory.empty_cache()

    def close(self) -> None:
        self._folder.cleanup()
