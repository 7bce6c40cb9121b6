"""Sampler and trainer of a model that reads images, held against transformers' own forward of each completion."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import torch

import rlcore
from tests.accuracy import assert_as_accurate

from .image_models import continued_logprobs, model_class, prompt_of
from .plain_training import products_in_tf32
from .train_policy import adamw_policy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file


def policy_of(family: str) -> Any:
    class Policy(adamw_policy(model_class(family), lr=1e-2, eps=1e-3)):  # eps: else signs of 0 to rounding
        def forget_steps(self) -> None:
            self.on_weights_materialized()

    return Policy


def module_of(family: str, folder: Path) -> Any:
    with rlcore.meta_device():
        return policy_of(family).from_pretrained(folder)


def mixed_prompts(family: str) -> list[Any]:
    """One image, two of different sizes, none, and again one; the longest first."""
    return [
        prompt_of(family, ((4, 8), (4, 4)), seed=2),
        prompt_of(family, seed=1),
        [1, 2, 3, 4],
        prompt_of(family, ((8, 4),), seed=3),
    ]


def check_logprobs(
    family: str, folder: Path, outputs: Any, batch: Any, train: rlcore.TrainEngine, *, device: str = "cpu"
) -> None:
    """Hold them against float64 on the host, as far as float32 by transformers' forward on ``device`` comes to it."""
    sampled_NL = batch.get("rollout_logprobs", batch["old_logprobs"])
    trained_NL, mask_NL, state = train.forward_logprobs(batch), batch["loss_mask"], train.state_dict(adapters="merged")
    exact, reference = (own_model(family, folder, state, dtype) for dtype in (torch.float64, torch.float32))
    reference.to(device)
    found: list[Any] = []
    completions = [(output, completion) for output in outputs for completion in output.outputs]
    for row, (output, completion) in enumerate(completions):
        with torch.no_grad(), products_in_tf32():
            plain = [
                continued_logprobs(model, output.prompt_token_ids, completion.token_ids, output.inputs)
                for model in (reference, exact)
            ]
        found.append((trained_NL[row][mask_NL[row]], sampled_NL[row][mask_NL[row]], *plain))
    trained, sampled, by_transformers, true = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert_as_accurate(trained, by_transformers, true, what="the trainer's")
    assert_as_accurate(sampled, by_transformers, true, what="the sampler's")


def own_model(family: str, folder: Path, state: Any, dtype: torch.dtype) -> Any:
    """transformers' own class with the trainer's weights, which have the names of the checkpoint that it began with."""
    model = policy_of(family).from_pretrained(folder).eval()
    model.stored_names(state)
    with torch.no_grad():
        for name, tensor in model.named_weights():
            tensor.copy_(state[name])
    return model.to(dtype)
