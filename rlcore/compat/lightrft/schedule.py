"""LightRFT's learning rate: transformers' schedule "cosine_with_min_lr"."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST = 0.1
"""The share of the rate with which training ends."""


@dataclass
class CosineSchedule:
    """The factor of the rate: linear up to 1, then half a cosine down to ``_LEAST``; 1 without a number of steps."""

    num_warmup: int = 0
    num_steps: int = 0

    def __call__(self, step: int) -> float:
        if not self.num_steps:
            return 1.0
        if step < self.num_warmup:
            return step / self.num_warmup
        progress = min(1.0, (step - self.num_warmup) / max(1, self.num_steps - self.num_warmup))
        return _LEAST + (1 - _LEAST) * 0.5 * (1 + math.cos(math.pi * progress))
