"""Tiny random models that read images, prompts with images, and what plain transformers computes of them.

Letters: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def qwen_config() -> Any:
    """Positions in time, height and width; images of any size; two layers of attention in windows and one over all."""
    from transformers import Qwen2_5_VLConfig

    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 32,
        "initializer_range": 0.3,
    }
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text = _TEXT | {"rope_parameters": rope}
    tokens = {"image_token_id": IMAGE, "video_token_id": 21, "vision_start_token_id": 22, "vision_end_token_id": 23}
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32", eos_token_id=14, **tokens
    )


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


CONFIGS: dict[str, Callable[[], Any]] = {"qwen2_5_vl": qwen_config, "llava": llava_config, "gemma3": gemma_config}


def model_class(family: str) -> Any:
    import transformers

    names = {"qwen2_5_vl": "Qwen2_5_VL", "llava": "Llava", "gemma3": "Gemma3"}
    return getattr(transformers, names[family] + "ForConditionalGeneration")


def write_model(folder: Path, family: str, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class(family)(CONFIGS[family]()).save_pretrained(folder)
    return folder


def prompt_of(family: str, images: tuple[tuple[int, int], ...] = ((4, 4),), *, seed: int = 0) -> dict[str, Any]:
    """Return a prompt as a processor makes it: before and after each image a few tokens of text.

    Args:
        images: rows and columns of patches of each; families of one size ignore them.
    """
    random = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(13, (length,), generator=random).tolist()

    if family == "qwen2_5_vl":
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


def plain_logprobs(model: Any, token_ids: list[int], num_image_tokens: int, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return [L - 1, V] of transformers' own forward of one sequence.

    Args:
        num_image_tokens: so many of the tokens, the first of their kind, stand for images.
    """
    ids_1L = torch.tensor([token_ids])
    is_image_1L = (ids_1L == IMAGE) & ((ids_1L == IMAGE).cumsum(1) <= num_image_tokens)
    names = model.forward.__wrapped__.__code__.co_varnames if hasattr(model.forward, "__wrapped__") else ()
    types = {name: is_image_1L.long() for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    dtype = model.get_output_embeddings().weight.dtype
    moved = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    logits_1LV = model(input_ids=ids_1L, use_cache=False, **types, **moved).logits
    found: Tensor = logits_1LV[0, :-1].log_softmax(-1)
    return found
