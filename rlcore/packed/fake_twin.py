"""A twin of a decoder that runs without values: its tensors are fake, and have a shape, a dtype and a device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from rlcore._torch_private import fake_tensors

NUM_TOKENS = 6


@contextlib.contextmanager
def fake_twin(decoder: Any, attention: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a twin of a transformers decoder, and the arguments of a forward pass, which has to run inside.

    Args:
        attention: the name of the implementation that the twin attends by.
    """
    config = copy.deepcopy(decoder.config)
    config._attn_implementation_internal = attention
    with fake_tensors(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
        inputs = {"input_ids": tokens, "position_ids": tokens.clone(), "use_cache": False}
        yield type(decoder)._from_config(config, dtype=torch.bfloat16).train(), inputs
