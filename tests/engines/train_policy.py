"""Modules that the tests of the train engine train, and engines on several workers that a file's tests share."""

from __future__ import annotations

import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from torch import Tensor

import rlcore
from rlcore._torch_private import TorchDispatchMode
from rlcore.nn import HuggingFaceTrainModule, OutputHead, TrainModule
from rlcore.ops import ppo_clip
from rlcore.weights.view import whole

from .plain_training import Truth
from .train_batches import VOCAB, packed_batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

Build = Callable[..., rlcore.TrainEngine]
NEXT_DEVICES = (2, 3, 6, 7, 0, 1)
"""Those of engines with more workers than two."""


class Place(NamedTuple):
    device: str
    workers: int


def places(*workers_of_each: tuple[str, int, Any]) -> Any:
    """A parameter ``place`` of these devices, workers and marks."""
    return pytest.mark.parametrize(
        "place",
        [pytest.param(Place(device, workers), marks=marks) for device, workers, marks in workers_of_each],
        ids=lambda place: f"{place.workers} {place.device}",
    )


def two_of(device: str, shared_devices: Sequence[str]) -> list[str]:
    """Return two devices of this type; of the CPU those whose processes the files share."""
    return list(shared_devices[:2]) if device == "cpu" else [f"{device}:{index}" for index in range(2)]


def loss_on(device: str) -> Any:
    """Return PPO's loss; on a GPU one without a clip, beside whose edge TF32 may put a token on the other side."""
    return ppo_clip() if device == "cpu" else policy_gradient


def adamw_policy(transformers_class: Any, **options: Any) -> Any:
    """Return a module class of a transformers model, trained by AdamW with these options."""

    class Policy(HuggingFaceTrainModule, transformers_class):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), **options)

    return Policy


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that collectives gather inside it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_allgather_base_":
            self.count += args[0].nbytes  # the output
        return func(*args, **(kwargs or {}))


def train_policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.forget_steps()

        def forget_steps(self, fused: bool = False, lr: float | Tensor = 1e-2) -> None:
            eps = 1e-3  # else the first step is the sign of the gradient, and that of a gradient of 0 is anything
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=lr, eps=eps, fused=fused)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

        def take(self, kind: str, **options: Any) -> None:
            """Train by another optimizer of torch."""
            self.optimizer = getattr(torch.optim, kind)(self.parameters(), **options)

        def total(self, rows: Any, offset: int = 0) -> int:
            return sum(rows) + offset

        def totals(self, rows: Any) -> list[int]:
            return [sum(rows)]

        def squares(self, rows: Any) -> list[int]:
            return [row * row for row in rows]

        def local_sizes(self) -> dict[str, int]:
            return {name: parameter.to_local().numel() for name, parameter in self.named_parameters()}

        def gathered_bytes(self) -> int:
            """Return the bytes that this rank gathers for a forward and a backward."""
            with GatheredBytes() as seen:
                self(torch.full((1, 4), 3, device=self.device)).logits.square().sum().backward()
            self.zero_grad()
            return seen.count

        def noise(self) -> tuple[float, float]:
            return float(torch.rand(1)), random.random()

        def limit_file_size(self, limits: list[int | None]) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard if limits[0] is None else limits[0], hard))

        def fail(self) -> None:
            raise KeyError("planted")

        def fail_in_a_block(self) -> None:
            """After one that is gathered with it has run."""

            def fail(*_: Any) -> None:
                raise ValueError("planted")

            hook = self.model.layers[1].register_forward_pre_hook(fail)
            try:
                self.hidden_states(packed_batch())
            finally:
                hook.remove()

        def score_alone(self) -> None:
            with torch.no_grad():
                self.hidden_states(packed_batch())

        def accumulate(self, token: int) -> float:
            """The norm of the last norm's gradient [H], with that of one more backward."""
            self(torch.full((1, 4), token, device=self.device)).logits.square().sum().backward()
            return float(self.model.norm.weight.grad.norm())

        def mean_gradient(self, token: int) -> Tensor:
            """Return the mean gradient of all parameters one after the other, in float32 on the host."""
            self(torch.full((1, 4), token, device=self.device)).logits.float().square().mean().backward()
            gradients = [whole(parameter.grad).float().cpu().flatten() for parameter in self.parameters()]
            self.zero_grad()
            return torch.cat(gradients)

    return Policy


class Regression(TrainModule):
    """A module that is not from transformers: an embedding and its tied head."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.mix = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.weights = weights

    def materialization_source(self) -> dict[str, Tensor]:
        return self.weights

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def hidden_states(self, batch: Any) -> Tensor:
        hidden: Tensor = self.mix(self.embed(batch["input_ids"])) * self.scale
        return hidden

    def output_head(self) -> OutputHead:
        return OutputHead(self.head.weight)


def regression_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(VOCAB, 8, generator=generator) * 0.3,
        "mix.weight": torch.randn(8, 8, generator=generator),
        "mix.bias": torch.zeros(8),
    }


def policy_gradient(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss without a clip, beside whose edge a rounding of bfloat16 may put a token on either side."""
    return -logprob * per_token["advantages"], {"probability_mean": logprob.exp(), "logprob_min": logprob}


def truth_of_own(module: Callable[[], Any], weights: dict[str, Tensor], device: str = "cpu") -> Truth:
    """Return the truth of a module whose weights are given by name, tied ones by one of two."""

    def make() -> Any:
        made = module()
        made.load_state_dict(weights, strict=False)
        return made

    return Truth(make, device=device)


def truth_of(policy: Any, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Truth:
    return Truth(lambda: policy.from_pretrained(folder), dtype, device)


@contextmanager
def engines_of(policy: Any, folder: Path, shared_devices: Sequence[str], runtime: Path) -> Iterator[Build]:
    """``build(workers, device="cpu", folder=..., **options)``: one engine for each arguments, back at its weights."""
    engines: dict[str, rlcore.TrainEngine] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RLCORE_RUNTIME", str(runtime))

        def get(workers: int, device: str = "cpu", folder: Path = folder, **options: Any) -> rlcore.TrainEngine:
            key = f"{workers} {device} {folder} {options}"
            if key not in engines:
                patch.setenv("RLCORE_RUNTIME", str(runtime))  # the settings of tests are taken back after each
                if device == "cuda" and torch.cuda.device_count() < workers:
                    pytest.skip(f"needs {workers} GPUs, found {torch.cuda.device_count()}")
                with rlcore.meta_device():
                    module = policy.from_pretrained(folder)
                engine = stack.enter_context(rlcore.TrainEngine(module))
                on_host = ["cpu:0"] if workers == 1 else [*shared_devices, *(f"cpu:{index}" for index in NEXT_DEVICES)]
                devices = on_host if device == "cpu" else [f"{device}:{index}" for index in range(workers)]
                shards = workers
                for name in ("replicas", "sequence_parallel_size", "tensor_parallel_size"):
                    shards //= options.get(name, 1)
                engine.build(devices=devices[:workers], data_parallel_size=shards, timeout_s=250, **options)
                engine.initial = engine.state_dict()  # type: ignore[attr-defined]
                engines[key] = engine
            engine = engines[key]
            engine.load_state_dict(engine.initial)  # type: ignore[attr-defined]
            engine.forget_steps()
            return engine

        yield get
