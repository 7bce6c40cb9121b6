"""The trainer of the tests of weight syncs into real vLLM: its weights change, and so must completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from tests.accuracy import assert_within_rounding

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = ["1+1=", "90210-777=", "3", "12*12+12="]


def trainer(folder: Path, **options: Any) -> rlcore.TrainEngine:
    """Return a trainer of the model in the folder, of any architecture."""
    import transformers

    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]

    class Policy(HuggingFaceTrainModule, getattr(transformers, architecture)):  # type: ignore[misc]
        @torch.no_grad()
        def scale(self, factor: float) -> None:
            for parameter in self.parameters():
                parameter.mul_(factor)

        @torch.no_grad()
        def shake(self, seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.device) * 0.2 * parameter.std())

    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
    return rlcore.TrainEngine(module).build(**options)


def fresh(train: rlcore.TrainEngine, folder: Path) -> list[rlcore.RequestOutput]:
    """Return the completions of transformers with the exported checkpoint; another test compares them with vLLM's."""
    train.export(folder)
    with rlcore.InferenceEngine(folder) as engine:
        return engine.build(devices="cpu:0", dtype="float32", launcher="inline").generate(PROMPTS, GREEDY)


def assert_same(ours: list[rlcore.RequestOutput], theirs: list[rlcore.RequestOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert_same_logprobs(one.outputs[0].logprobs, other.outputs[0].logprobs)


def assert_same_logprobs(found: Any, expected: Any) -> None:
    """Log-probabilities of one float32 model by two ways, of which vLLM's kernels may multiply in TF32.

    Its mantissa has 10 bits, as that of float16: both factors of a product are rounded so. What is multiplied last has
    about the size of a log-probability, or of 1.
    """
    exact = torch.as_tensor(expected, dtype=torch.float64)
    options: dict[str, Any] = {"terms": 2, "magnitude": 1 + exact.abs(), "dtype": torch.float16}
    assert_within_rounding(torch.as_tensor(found), exact, **options, what="log-probabilities")
