"""Micro-batches on their way to the device: what stays on the host, and that nobody waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.batch import to_packed
from rlcore.engines.executors import step as train_step
from rlcore.engines.executors.micro_batch import MicroBatch, micro_batches, on_device
from rlcore.engines.executors.step import _accumulate
from rlcore.engines.executors.strategy import OneDevice
from rlcore.engines.executors.train_options import StepOptions
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.engines.rank_batch import WEIGHT, rank_batches
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from tests.counts import Counts

from .plain_training import assert_metrics
from .train_policy import policy_gradient, truth_of

CPU = torch.device("cpu")
LENGTHS = (12, 3, 7, 2, 9)


def batch() -> dict[str, Tensor]:
    total = sum(LENGTHS)
    weight_T = torch.full((total,), 1 / total)
    weight_T[torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)] = 0  # nothing precedes these
    return {
        "input_ids": torch.arange(total) % 21,
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        "old_logprobs": -torch.ones(total),
        "advantages": torch.linspace(-1, 1, total),
        WEIGHT: weight_T,
    }


def test_a_padded_batch_is_packed_without_what_wakes_every_thread_of_the_host() -> None:
    mask_NL = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids_NL = torch.arange(mask_NL.numel()).view(mask_NL.shape)
    with Counts() as counts:
        packed = to_packed({"input_ids": ids_NL, "attention_mask": mask_NL, "advantages": torch.arange(5.0)})
    assert packed["input_ids"].tolist() == ids_NL[mask_NL].tolist()
    assert packed["advantages"].tolist() == [float(row) for row, length in enumerate(LENGTHS) for _ in range(length)]
    assert not {"index", "repeat_interleave"} & counts.launches.keys()


def parts_on(device: Any, max_tokens: int) -> list[MicroBatch]:
    (own,) = rank_batches(batch(), 1, max_tokens)
    return list(micro_batches(own, own.packed[WEIGHT] != 0, max_tokens, device.torch_device))


def test_boundaries_stay_on_the_host_and_the_rest_is_on_the_device(device: Any) -> None:
    parts = parts_on(device, 15)
    assert len(parts) == 3
    for part in parts:
        boundaries = part.tokens["cu_seqlens"], part.cu_rows
        assert all(edges.device.type == "cpu" and edges.dtype == torch.int32 for edges in boundaries)
        assert part.tokens["cu_seqlens"][-1] == len(part.tokens["input_ids"])
        assert part.cu_rows[-1] == len(part.rows_S) == len(part.targets_S)
        there = [part.tokens["input_ids"], part.rows_S, part.targets_S, *part.per_token.values()]
        assert all(tensor.device == device.torch_device for tensor in there)


def test_every_kind_of_tensor_arrives_by_one_copy(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.empty(0),
        torch.linspace(0, 1, 7, dtype=torch.float64).view(7, 1),
        torch.arange(12).view(3, 4).T,
        torch.ones(1, dtype=torch.bfloat16),
    ]
    copies, to = [], Tensor.to

    def counted(*args: Any, **options: Any) -> Tensor:
        copies.append(args)
        return to(*args, **options)

    monkeypatch.setattr(Tensor, "to", counted)
    found = on_device(tensors, device.torch_device)
    assert len(copies) == 1
    for there, tensor in zip(found, tensors, strict=True):
        assert there.device == device.torch_device and there.dtype == tensor.dtype
        assert there.data_ptr() % 16 == 0 or not there.numel()
        assert torch.equal(there.cpu(), tensor)


@pytest.mark.parametrize(
    ("lengths", "count", "expected"),
    [
        ((6, 5, 5, 4), 3, [9, 6, 5]),  # first-fit has 10, 10 and none
        ((9, 9, 1, 1), 2, [10, 10]),
        ((6, 6, 4, 4, 4, 6), 3, [10, 10, 10]),
        ((5, 5, 4, 3, 3), 2, [10, 10]),  # one after the other into the emptier would come to 11
        ((7,), 2, [7]),
    ],
)
def test_micro_batches_have_about_equal_tokens_and_no_more_than_the_limit(
    lengths: tuple[int, ...], count: int, expected: list[int]
) -> None:
    packed = {"input_ids": torch.arange(sum(lengths)), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    (own,) = rank_batches(packed, 1, 10)
    parts = list(micro_batches(replace(own, num_micro_batches=count), torch.ones(sum(lengths)) > 0, 10, CPU))
    tokens = [len(part.tokens["input_ids"]) for part in parts]
    assert tokens[: len(expected)] == expected and len(parts) == count
    assert all(len(part.rows_S) == 0 for part in parts[len(expected) :])
    of_all = torch.cat([part.tokens["input_ids"] for part in parts[: len(expected)]])
    assert torch.equal(of_all.sort().values, packed["input_ids"])


def test_a_worker_that_is_done_joins_in_with_what_compiled_blocks_take_for_any_other(device: Any) -> None:
    packed = batch()
    few, many = {name: value[:12] for name, value in packed.items() if name != "cu_seqlens"}, 3
    own = rank_batches(few | {"cu_seqlens": packed["cu_seqlens"][:2]}, 1, 12)[0]
    parts = list(micro_batches(replace(own, num_micro_batches=many), few[WEIGHT] != 0, 12, device.torch_device))
    assert [len(part.rows_S) for part in parts] == [11, 0, 0]
    assert [part.num_counted for part in parts] == [12, 0, 0]
    for part in parts:
        assert min(len(tensor) for tensor in part.tokens.values()) > 1, "the compiler takes a size of 1 for a constant"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_no_micro_batch_waits_for_the_device(policy: Any, qwen2_folder: Path) -> None:
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cuda:0", launcher="inline")
        worker = engine.executors[0].workers[0].worker
        options = StepOptions(max_tokens_per_micro_batch=15, temperature=1.0, with_entropy=True, max_grad_norm=1.0)
        (own,) = rank_batches(batch(), 1, 15)
        for mode in ("default", "error"):  # what is compiled and chosen the first time may wait
            torch.cuda.set_sync_debug_mode(mode)
            try:
                metrics = _accumulate(worker.strategy, own, policy_gradient, options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    whole = batch()
    weight_T = whole.pop(WEIGHT)
    truth = truth_of(policy, qwen2_folder, "cuda")
    step = truth.step(whole | {"loss_mask": weight_T != 0}, policy_gradient, weight_T=weight_T)
    assert_metrics({name: float(value) for name, value in metrics.joined(num_alike=1).items()}, *step)


class Scaled(torch.optim.Optimizer):
    """Clips and skips on the device, as fused ones do there."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(torch.where(self.found_inf > 0, 0.0, parameter.grad / self.grad_scale))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3Moe"])
def test_the_host_reads_nothing_before_the_end_of_a_step(
    write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On the meta device there is nothing to read: an ``item()``, a ``nonzero`` or a copy to the host raises."""
    import transformers

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    folder = write_checkpoint(
        getattr(transformers, f"{kind}Config")(**tiny_config | (experts if "Moe" in kind else {}))
    )

    class Policy(HuggingFaceTrainModule, getattr(transformers, f"{kind}ForCausalLM")):  # type: ignore[misc]
        pass

    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
    place = torch.device("meta")
    dtype = "bfloat16" if kind == "Qwen3Moe" else "float32"  # what torch's grouped product takes there
    shard(module, Sharding(dtype=dtype), place, lambda: None, size=1)
    module.to(place)
    module.optimizer = Scaled(module.parameters(), {"lr": 1.0})
    device = SimpleNamespace(torch_device=place, profiler=SimpleNamespace(range=lambda name: nullcontext()))
    options = StepOptions(max_tokens_per_micro_batch=15, temperature=1.0, with_entropy=True, max_grad_norm=1.0)
    (own,) = rank_batches(batch(), 1, 15)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know the device
    ended = RuntimeError("all is launched")
    begun: list[str] = []

    def begin_reading(numbers: dict[str, torch.Tensor], device: Any) -> Any:
        begun.extend(numbers)
        return lambda: (_ for _ in ()).throw(ended)

    monkeypatch.setattr(train_step, "_begin_reading", begin_reading)
    with pytest.raises(RuntimeError, match="all is launched"):
        train_step.train_step(OneDevice(module, device), own, ppo_clip(), options)
    assert {"loss", "grad_norm"} <= set(begun)
    assert ("expert_load/entropy" in begun) is (kind == "Qwen3Moe")


CUTTING_IN_A_PROCESS_OF_FOUR_THREADS = """
import os, torch
from rlcore.engines.executors.micro_batch import micro_batches
from rlcore.engines.rank_batch import rank_batches

def num_threads():
    return len(os.listdir("/proc/self/task"))

cu_seqlens = torch.arange(0, 8192 + 1, 1024, dtype=torch.int32)
packed = {"input_ids": torch.zeros(8192, dtype=torch.int64), "advantages": torch.zeros(8192), "cu_seqlens": cu_seqlens}
before = num_threads()
for own in rank_batches(packed, 2, 2048):
    scored_T = torch.ones(4096, dtype=torch.bool)
    assert len(list(micro_batches(own, scored_T, 2048, torch.device("cpu")))) == 2
after = num_threads()
packed["input_ids"][torch.arange(8192)]
print(after - before, num_threads() - after)
"""


@pytest.mark.slow
def test_cutting_wakes_no_other_thread_of_the_host() -> None:
    """On a busy host each time took 10 ms, and the device waited."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CUTTING_IN_A_PROCESS_OF_FOUR_THREADS],
        env=os.environ | {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    ours, of_indexing = map(int, found.stdout.split())
    assert of_indexing > 0, "torch has changed: nothing is shown here any more"
    assert ours == 0
