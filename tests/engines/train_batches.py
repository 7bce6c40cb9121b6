"""Batches that the tests of the train engine train on, and the comparison of weights that nothing changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.accuracy import assert_same_bits

VOCAB = 21
"""Token ids of the tiny models."""


def packed_batch(lengths: tuple[int, ...] = (12, 3, 7, 2, 9, 5, 14), seed: int = 5) -> dict[str, Tensor]:
    """Packed sequences of these lengths, of which all but the first two tokens are trained on.

    With this seed and the tiny models' weights no ratio of probabilities comes nearer than 3 % to an edge of
    ``ppo_clip``'s, where TF32 products might put it on the other side.
    """
    place_T = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"cu_seqlens": cu_seqlens} | _contents(place_T >= 2, len(lengths), seed)


def padded_batch(lengths: tuple[int, ...] = (12, 3, 7, 2, 9), seed: int = 0) -> dict[str, Tensor]:
    """The same, padded to the longest."""
    place_L = torch.arange(max(lengths))
    mask_NL = place_L < torch.tensor(lengths)[:, None]
    return {"attention_mask": mask_NL} | _contents(mask_NL & (place_L >= 2), len(lengths), seed)


def packed(padded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same batch without padding."""
    mask_NL = padded["attention_mask"]
    entries = {name: entry for name, entry in padded.items() if name != "attention_mask"}
    cu_seqlens = torch.nn.functional.pad(mask_NL.sum(1).cumsum(0), (1, 0)).int()
    return {"cu_seqlens": cu_seqlens} | {
        name: entry[mask_NL] if entry.shape == mask_NL.shape else entry for name, entry in entries.items()
    }


def repeated(batch: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """A packed batch of one sequence, so many times."""
    length = len(batch["input_ids"])
    rest = {name: value.repeat(times) for name, value in batch.items() if name != "cu_seqlens"}
    return rest | {"cu_seqlens": torch.arange(times + 1, dtype=torch.int32) * length}


def _contents(loss_mask: Tensor, num_sequences: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(VOCAB, loss_mask.shape, generator=generator),
        "loss_mask": loss_mask,
        "old_logprobs": -torch.rand(loss_mask.shape, generator=generator) * 3,
        "advantages": torch.randn(num_sequences, generator=generator),
    }


def assert_same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """For weights that were moved, and not computed."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)
