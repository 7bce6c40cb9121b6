"""Tiny random models that read images, prompts with images, and what plain transformers computes of them.

Letters: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.sequence_input import SequenceInput

from .plain_training import PlainTraining, Truth

IMAGE = 20
"""The token that stands for a part of an image."""
VOCAB = 24
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 14,
    "pad_token_id": None,
}


_MROPE: dict[str, Any] = _TEXT | {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 21, "vision_start_token_id": 22, "vision_end_token_id": 23}


def qwen_config() -> Any:
    """Positions in time, height and width; images of any size; two layers of attention in windows and one over all."""
    from transformers import Qwen2_5_VLConfig

    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 32,
        "initializer_range": 0.3,
    }
    return Qwen2_5_VLConfig(
        text_config=_MROPE,
        vision_config=vision | _PATCHES,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_id=14,
        **_TOKENS,
    )


def qwen2_config() -> Any:
    from transformers import Qwen2VLConfig

    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config=_MROPE, vision_config=vision | _PATCHES, dtype="float32", **_TOKENS)


def qwen3_config() -> Any:
    """Features of images also go into the first layers of the decoder."""
    from transformers import Qwen3VLConfig

    rope = _MROPE["rope_parameters"] | {"mrope_interleaved": True}
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
    }
    text = _MROPE | {"head_dim": 8, "rope_parameters": rope}
    return Qwen3VLConfig(text_config=text, vision_config=vision | _PATCHES, dtype="float32", **_TOKENS)


def llava_config() -> Any:
    """Positions that count; images of one size, of four tokens each."""
    from transformers import LlavaConfig

    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "projection_dim": 16,
    }
    return LlavaConfig(
        text_config=_TEXT | {"model_type": "llama"},
        vision_config=vision,
        image_token_index=IMAGE,
        dtype="float32",
        eos_token_id=14,
    )


def gemma_config() -> Any:
    """The tokens of an image see each other in both directions, so that no rows are packed."""
    from transformers import Gemma3Config

    text = _TEXT | {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    return Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE, dtype="float32"
    )


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", qwen_config),
    "qwen2_vl": ("Qwen2VL", qwen2_config),
    "qwen3_vl": ("Qwen3VL", qwen3_config),
    "llava": ("Llava", llava_config),
    "gemma3": ("Gemma3", gemma_config),
}


def model_class(family: str) -> Any:
    import transformers

    return getattr(transformers, CONFIGS[family][0] + "ForConditionalGeneration")


def write_model(folder: Path, family: str, seed: int = 0, config: Any = None) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class(family)(config or CONFIGS[family][1]()).save_pretrained(folder)
    return folder


def prompt_of(family: str, images: tuple[tuple[int, int], ...] = ((4, 4),), *, seed: int = 0) -> dict[str, Any]:
    """Return a prompt as a processor makes it: before and after each image a few tokens of text.

    Args:
        images: rows and columns of patches of each; families of one size ignore them.
    """
    random = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(13, (length,), generator=random).tolist()

    if family.startswith("qwen"):
        grid = torch.tensor([[1, rows, columns] for rows, columns in images])
        lengths = [rows * columns // 4 for rows, columns in images]
        inputs = {
            "pixel_values": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, generator=random),
            "image_grid_thw": grid,
        }
    else:
        size = 8 if family == "llava" else 16
        lengths = [4] * len(images)
        inputs = {"pixel_values": torch.randn(len(images), 3, size, size, generator=random)}
    ids = text(2)
    for length in lengths:
        ids += [IMAGE] * length + text(3)
    return {"input_ids": torch.tensor([ids])} | (inputs if images else {})


class PlainImageTraining(PlainTraining):
    """A model of images trained one sequence at a time by transformers' own forward: no packing, no rows, no cuts."""

    def __init__(
        self, module: Any, dtype: torch.dtype, inputs: Mapping[str, SequenceInput], device: str = "cpu"
    ) -> None:
        super().__init__(module, dtype, device)
        self.inputs = inputs

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        lengths = batch["cu_seqlens"].diff().tolist()
        logits = [
            plain_logits(self.module, ids_L, {name: value.part(number) for name, value in self.inputs.items()})
            for number, ids_L in enumerate(batch["input_ids"].split(lengths))
        ]
        return torch.cat(logits)[batch["loss_mask"].nonzero()[:, 0] - 1]


class ImageTruth(Truth):
    """The truth that an engine must come to with these images."""

    def __init__(self, make: Callable[[], Any], inputs: Mapping[str, SequenceInput], device: str = "cpu") -> None:
        super().__init__(make, device=device)
        self.exact = PlainImageTraining(make(), torch.float64, inputs)
        self.reference = PlainImageTraining(make(), torch.float32, inputs, device)


def continued_logprobs(model: Any, prompt: list[int], completion: list[int], inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-prob, on the host, of each token of a completion by transformers' own forward: the prompt first.

    In the completion no token stands for an image: transformers' forward of all at once would take it for one.
    """
    ids = torch.tensor([completion], device=model.device)
    model.model.rope_deltas = None  # the Qwen models would take those of the last prompt with images for a text's
    first = _forward(model, torch.tensor(prompt), inputs, use_cache=True)
    then = model(input_ids=ids[:, :-1], past_key_values=first.past_key_values) if len(completion) > 1 else None
    logits = torch.cat([first.logits[0, -1:], *([] if then is None else [then.logits[0]])])
    return logits.log_softmax(-1).gather(1, ids.T)[:, 0].cpu()


def plain_logits(model: Any, ids_L: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return [L, V] of transformers' own forward of one sequence, all of whose image tokens stand for images."""
    logits_LV: Tensor = _forward(model, ids_L, inputs, use_cache=False).logits[0]
    return logits_LV


def _forward(model: Any, ids_L: Tensor, inputs: Mapping[str, Tensor], **options: Any) -> Any:
    from transformers import Gemma3ForConditionalGeneration

    ids_L = ids_L.to(model.device)
    is_image_1L = (ids_L == IMAGE)[None]
    name = "token_type_ids" if isinstance(model, Gemma3ForConditionalGeneration) else "mm_token_type_ids"
    types = (
        {name: is_image_1L.long()} if is_image_1L.any() and not hasattr(model.config, "projector_hidden_act") else {}
    )
    dtype = next(model.parameters()).dtype
    moved = {
        name: value.to(model.device, dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
        if len(value)
    }
    return model(input_ids=ids_L[None], **types, **moved, **options)


def image_batch(prompts: Sequence[Any], *, num_new: int = 5, seed: int = 0) -> dict[str, Any]:
    """Return packed sequences of these prompts, each with so many further tokens, which are trained on."""
    random = torch.Generator().manual_seed(seed)
    ids = [torch.as_tensor(prompt["input_ids"][0] if isinstance(prompt, dict) else prompt) for prompt in prompts]
    sequences = [torch.cat([one, torch.randint(13, (num_new,), generator=random)]) for one in ids]
    names = [name for prompt in prompts if isinstance(prompt, dict) for name in prompt if name != "input_ids"]
    inputs = {
        name: SequenceInput.of([prompt.get(name) if isinstance(prompt, dict) else None for prompt in prompts])
        for name in dict.fromkeys(names)
    }
    loss_mask = torch.cat([torch.arange(len(one)) >= len(one) - num_new for one in sequences])
    total = len(loss_mask)
    return {
        "input_ids": torch.cat(sequences),
        "cu_seqlens": torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32),
        "loss_mask": loss_mask,
        "old_logprobs": -torch.rand(total, generator=random) * 3,
        "advantages": torch.randn(len(sequences), generator=random),
        **inputs,
    }


def tensors_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def inputs_of(batch: Mapping[str, Any]) -> dict[str, SequenceInput]:
    return {name: value for name, value in batch.items() if isinstance(value, SequenceInput)}
