"""The seeds of requests, and the random keys of their samples, which depend on the request alone."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import MultimodalPrompt


def seeds_of_each(params: Sequence[SamplingParams]) -> list[int]:
    """Return the seed of each prompt; where none is given, one from torch's default generator."""
    drawn: list[int] = torch.randint(-(2**63), 2**63 - 1, (len(params),)).tolist()
    return [one.seed if one.seed is not None else new for one, new in zip(params, drawn, strict=True)]


def sample_keys(prompt: Sequence[int], *, seed: int, n: int) -> list[int]:
    """Return a 64-bit key for each of n samples of a prompt.

    The prompt is part of the key, so that one seed for many prompts gives each its own random numbers.
    """
    request = hashlib.blake2b(array("q", [seed, *prompt]).tobytes(), digest_size=8)
    if isinstance(prompt, MultimodalPrompt):
        request.update(prompt.digest)
    keys = []
    for index in range(n):
        sample = request.copy()
        sample.update(array("q", [index]).tobytes())
        keys.append(int.from_bytes(sample.digest(), "little", signed=True))
    return keys
