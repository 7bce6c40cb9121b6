"""A policy whose methods the tests of several workers call, and the engines of it that a file's tests share."""

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
from rlcore.nn import HuggingFaceTrainModule
from rlcore.weights.view import whole

from .plain_training import Truth
from .train_batches import packed_batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

Build = Callable[..., rlcore.TrainEngine]


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


def sharded_policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.forget_steps()

        def forget_steps(self, fused: bool = False) -> None:
            eps = 1e-3  # else the first step is the sign of the gradient, and that of a gradient of 0 is anything
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=eps, fused=fused)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

        def total(self, rows: Any) -> int:
            return sum(rows)

        def totals(self, rows: Any) -> list[int]:
            return [sum(rows)]

        def squares(self, rows: Any) -> list[int]:
            return [row * row for row in rows]

        def local_sizes(self) -> dict[str, int]:
            return {name: parameter.to_local().numel() for name, parameter in self.named_parameters()}

        def noise(self) -> tuple[float, float]:
            return float(torch.rand(1)), random.random()

        def limit_file_size(self, limits: list[int | None]) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard if limits[0] is None else limits[0], hard))

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

        def mean_gradient(self, token: int) -> Tensor:
            """Of the last norm's weight [H], in float32 on the host."""
            self(torch.full((1, 4), token, device=self.device)).logits.float().square().mean().backward()
            gradient = whole(self.model.norm.weight.grad).float().cpu()
            self.zero_grad()
            return gradient

    return Policy


def policy_gradient(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss without a clip, beside whose edge a rounding of bfloat16 may put a token on either side."""
    return -logprob * per_token["advantages"], {"probability_mean": logprob.exp(), "logprob_min": logprob}


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
                on_host = ["cpu:0"] if workers == 1 else [*shared_devices, "cpu:2", "cpu:3"]
                devices = on_host if device == "cpu" else [f"{device}:{index}" for index in range(workers)]
                shards = workers // options.get("replicas", 1)
                engine.build(devices=devices[:workers], data_parallel_size=shards, timeout_s=250, **options)
                engine.initial = engine.state_dict()  # type: ignore[attr-defined]
                engines[key] = engine
            engine = engines[key]
            engine.load_state_dict(engine.initial)  # type: ignore[attr-defined]
            engine.forget_steps()
            return engine

        yield get
