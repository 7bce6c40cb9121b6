"""The language model of the engine cases: a Qwen2 with random weights, written as a Hugging Face folder."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcore.device import Device
from rlcore.errors import MissingDependencyError
from rlcore.tensor_data import dtype_name


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of what it is given."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: torch.dtype
    prompts: int
    samples: int
    """Completions of each prompt."""
    prompt_tokens: int
    new_tokens: int
    """At most; lengths are drawn from a long tail below it."""

    @property
    def params(self) -> dict[str, int | float | str]:
        shown = ("name", "prompts", "samples", "prompt_tokens", "new_tokens")
        dtype = dtype_name(self.dtype)
        return {("model" if key == "name" else key): getattr(self, key) for key in shown} | {"dtype": dtype}


_ACCELERATOR = Size("qwen2-0.5b", 896, 4864, 24, 14, 2, 151_936, torch.bfloat16, 16, 8, 128, 64)
_HOST = Size("qwen2-tiny", 128, 512, 2, 2, 2, 512, torch.float32, 4, 4, 16, 24)


def size_on(device: Device) -> Size:
    return _HOST if device.spec.is_host else _ACCELERATOR


def transformers_class(name: str) -> Any:
    """Raises MissingDependencyError without transformers."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="this case", extra="hf") from error
    return getattr(transformers, name)


def qwen2_config(size: Any, **options: Any) -> Any:
    """Of a ``Size``, or of what else has its numbers of a model.

    Raises:
        MissingDependencyError: there is no transformers.
    """
    return transformers_class("Qwen2Config")(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )


def config(size: Size) -> Any:
    """Raises MissingDependencyError without transformers."""
    return qwen2_config(size, max_position_embeddings=4096, tie_word_embeddings=True, dtype=size.dtype)


class Folder:
    """A model folder that is removed by ``close``."""

    def __init__(self, size: Size, device: Device) -> None:
        """The numbers are drawn on ``device``: half a billion take a host many seconds."""
        made = config(size)
        from transformers import Qwen2ForCausalLM

        self._folder = tempfile.TemporaryDirectory(prefix="rlcore-bench-")
        self.path = Path(self._folder.name)
        with torch.random.fork_rng(devices=[]), device.torch_device:
            torch.manual_seed(0)
            Qwen2ForCausalLM(made).to(size.dtype).save_pretrained(self.path)
        device.memory.empty_cache()

    def close(self) -> None:
        self._folder.cleanup()


def prompts(size: Size) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(size.vocabulary, (size.prompts, size.prompt_tokens), generator=generator)
    return [list(map(int, row)) for row in drawn]


def lengths(size: Size) -> list[int]:
    """New tokens for each prompt: most are short, one is the longest."""
    return [max(2, round(size.new_tokens * 0.5 ** (number % 4))) for number in range(size.prompts)]


def train_batch(size: Size) -> dict[str, torch.Tensor]:
    """What ``rlcore.collate`` makes of completions of these lengths, with random tokens."""
    generator = torch.Generator().manual_seed(1)
    rows, longest = size.prompts * size.samples, size.prompt_tokens + size.new_tokens
    ends = torch.tensor(lengths(size)).repeat_interleave(size.samples)[:, None] + size.prompt_tokens
    positions = torch.arange(longest)[None]
    attention_mask = positions < ends
    return {
        "input_ids": torch.randint(size.vocabulary, (rows, longest), generator=generator) * attention_mask,
        "attention_mask": attention_mask,
        "loss_mask": attention_mask & (positions >= size.prompt_tokens),
        "old_logprobs": torch.full((rows, longest), -float(torch.tensor(size.vocabulary).log())),
        "advantages": torch.randn(rows, generator=generator),
    }
