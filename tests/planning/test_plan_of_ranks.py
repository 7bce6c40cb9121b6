"""The plan of one rank of FSDP2 beside what torch's allocator gave in processes of two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import rlcore
from rlcore.engines.memory_plan.trainer import batch_of
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from rlcore.packed.sequence_parallel import SequenceGroup
from rlcore.planning.hardware import hardware
from rlcore.planning.layout import StepLayout
from rlcore.planning.model import planned_model
from rlcore.planning.step import PhaseMemory, plan_step
from rlcore.planning.traces import Traces
from tests.planning import host_peak
from tests.warm import warm_workers

for module in (sys.modules[__name__], host_peak):  # the children cannot import these files
    cloudpickle.register_pickle_by_value(module)

LEAST, MOST = 0.90, 1.10
"""The promise of a plan for a host, as parts of what is measured."""
SIZES = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True, "max_position_embeddings": 1024,
}  # fmt: skip
OPTIONS = [
    {"gather_bytes": 1 << 20},
    {"gather_bytes": 1 << 20, "activation_checkpointing": True, "compute_dtype": "bfloat16"},
    {"gather_bytes": 1 << 20, "reshard_after_forward": False},
    {},
    {"gather_bytes": 1 << 20, "sequence_parallel_size": 2},
    {
        "gather_bytes": 1 << 20, "activation_checkpointing": True, "compute_dtype": "bfloat16",
        "sequence_parallel_size": 2,
    },
]  # fmt: skip
LENGTH, MAX_TOKENS = 64, 256
"""Tokens of a sequence, and those of a micro-batch that one rank computes at most."""


def measured_policy() -> Any:
    """Return a module that tells what the allocator of its process gives between two calls."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class Measured(HuggingFaceTrainModule, Qwen2ForCausalLM):  # type: ignore[misc]
        def materialization_source(self) -> Any:
            return {name: torch.ones(parameter.shape) / 100 for name, parameter in self.named_parameters()}

        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-6, fused=True)

        def start(self) -> None:
            """Measure from now on, and exchange sequences by copies of the same size.

            gloo holds the tensors of an exchange beyond its end, up to 1.6 MB of these: no plan counts them.
            """
            self.exchange, SequenceGroup.exchange = SequenceGroup.exchange, _copied  # type: ignore[method-assign]
            self.profile = host_peak.started()

        def stop(self) -> int:
            peak = host_peak.stopped(self.profile)
            SequenceGroup.exchange = self.exchange  # type: ignore[method-assign]
            del self.profile, self.exchange
            return peak

    with rlcore.meta_device():
        module = Measured._from_config(Qwen2Config(**SIZES))
    module.output_head()
    return module


def _copied(_: SequenceGroup, parts: torch.Tensor) -> torch.Tensor:
    return parts.clone()


@pytest.fixture(scope="module")
def _two_processes(short_runtime_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, warm_workers():
        patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
        yield


def grown(phase: PhaseMemory) -> int:
    """Return what a phase takes beside what is held between two steps."""
    return sum(size for name, size in phase.parts.items() if name not in {"weights", "buffers", "optimizer"})


def workspace(options: dict[str, Any]) -> int:
    """Return what oneDNN may take beside tensors, which no plan of a host counts.

    On a processor without instructions for bfloat16 it holds a product's result in float32 until it is rounded; the
    largest one is the logits.
    """
    return 4 * MAX_TOKENS * SIZES["vocab_size"] if options.get("compute_dtype") == "bfloat16" else 0


@pytest.mark.slow
@pytest.mark.usefixtures("_two_processes")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_rank_takes_what_is_planned(options: dict[str, Any]) -> None:
    sequences = options.get("sequence_parallel_size", 1)
    max_tokens = MAX_TOKENS * sequences
    batch = batch_of([LENGTH] * 16) | {"loss_mask": torch.ones(16 * LENGTH, dtype=torch.bool)}
    with rlcore.TrainEngine(measured_policy()) as engine:
        engine.build(devices=["cpu:0", "cpu:1"], launcher="process", data_parallel_size=2 // sequences, **options)
        engine.train_batch(batch, ppo_clip(), max_tokens_per_micro_batch=max_tokens)

        def peak(step: Callable[[], object]) -> int:
            engine.call("start")
            step()
            return max(engine.call("stop"))

        limit: dict[str, Any] = {"max_tokens_per_micro_batch": max_tokens}
        steps = [
            lambda: engine.forward_logprobs(batch, **limit),
            lambda: engine.train_batch(batch, ppo_clip(), **limit),
        ]
        # A thread of gloo that is late, on a busy machine, holds its buffers beyond what comes next.
        measured = [min(peak(step) for _ in range(3)) for step in steps]
        tags = engine.memory_report()[0]["tags"]
    of_layout = {"activation_checkpointing", "sequence_parallel_size"}
    common = {name: value for name, value in options.items() if name not in of_layout}
    traces = Traces(planned_model(measured_policy()), hardware("cpu"), LENGTH, 0, common)
    recompute = options.get("activation_checkpointing", False)
    layout = StepLayout(count=2, sequence_parallel=sequences, recompute=recompute, max_tokens=max_tokens)
    plan = plan_step(traces, layout, None)
    for name in ("weights", "optimizer"):
        assert plan.phases[0].parts[name] == tags[name]["device_bytes"]
    for phase, real in zip(plan.phases, measured, strict=True):
        planned = grown(phase)
        assert LEAST * real <= planned + workspace(options), (phase.name, planned, real)
        assert planned <= MOST * real, (phase.name, planned, real)
