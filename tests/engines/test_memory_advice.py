"""After an allocation has failed in a step the error says what fits instead, by a plan of the same step."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.executors.worker import MemoryReport
from rlcore.engines.launchers import want_of_memory as of_launchers
from rlcore.engines.launchers.want_of_memory import want_of_memory
from rlcore.engines.memory_plan.advice import Failed, advice
from rlcore.engines.memory_plan.trainer import batch_of, workspaces
from rlcore.errors import WorkerError
from rlcore.ops import ppo_clip
from rlcore.planned import PlannedDevice, as_planned
from rlcore.types import MemoryInfo, MemoryStats
from tests.planning.peaks import module_of

CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
GPU = PlannedDevice("cuda", cores=132, arch=90)
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.18 GiB")


def report(room: int, others: int = 0) -> MemoryReport:
    """A device with ``room`` bytes for an engine, of which its weights have some, beside tensors of others."""
    own = min(room, 1000)
    return {
        "device": "cuda:0",
        "tags": {"weights": {"device_bytes": own, "host_bytes": 0}},
        "stats": MemoryStats(own + others, own + others, own + others),
        "info": MemoryInfo(room - own, room + others),
    }


def failed(**options: Any) -> Failed:
    return Failed([256] * 16, 4096, trains=True, executor="fsdp2", options={"compute_dtype": "bfloat16"} | options)


@pytest.mark.parametrize(
    ("mib", "options", "expected", "absent"),
    [
        (
            40,
            {},
            r"fits with max_tokens_per_micro_batch=\d+ \(it was 4096\)\. Built with act.*=True it fits with",
            "no",
        ),
        (33, {"activation_checkpointing": True}, r"plan, this step has \d+ bytes.* on cuda:0\. It fits with", "Built"),
        (12, {}, r"It fits with no micro-batch that holds the longest sequence: cut the weights", "Built"),
    ],
)
def test_the_advice_names_numbers_that_fit(mib: int, options: dict[str, Any], expected: str, absent: str) -> None:
    text = advice(
        module_of(CONFIG, None), failed(**options), GPU, report((mib << 20) + sum(workspaces(GPU)), others=7), 1
    )
    assert re.search(expected, text), text
    assert absent not in text.split()
    assert "7 bytes are tensors of others in this process: offload the engines" in text


def test_what_is_not_planned_gets_general_advice() -> None:
    module = module_of(CONFIG, None)
    for given, workers in ((failed(), 2), (failed(compile=True), 1), (failed(no_such=1), 1)):
        text = advice(module, given, GPU, report(1 << 30), workers)
        assert text.startswith("To make it fit: Use a smaller max_tokens_per_micro_batch, build with")
    assert "No plan of this step could be made: TypeError" in text


def test_a_step_without_memory_is_told_what_fits() -> None:
    module, kept = module_of(CONFIG, None, "cpu"), []

    class Hungry(type(module)):  # type: ignore[misc]
        def hidden_states(self, batch: Any) -> torch.Tensor:
            if len(batch["input_ids"]) > 300 and not batch["input_ids"].is_meta:
                large = torch.empty(1 << 20)
                kept.append(weakref.ref(large))
                raise torch.OutOfMemoryError(*OUT.args)
            found: torch.Tensor = super().hidden_states(batch)
            return found

    module.__class__ = Hungry
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices=["cpu"], launcher="inline")
        with pytest.raises(WorkerError, match=r"About 1073741824 bytes were asked for") as caught:
            engine.train_batch(batch_of([256, 256]), ppo_clip(), max_tokens_per_micro_batch=512)
        assert caught.value.is_out_of_memory
        assert [one() for one in kept] == [None]  # the error does not keep what the next attempt needs
        assert "It fits with max_tokens_per_micro_batch=256 (it was 512)." in caught.value.__notes__[-1]
        engine.train_batch(batch_of([256, 256]), ppo_clip(), max_tokens_per_micro_batch=256)
        with pytest.raises(WorkerError) as other:
            engine.call("hidden_states", {})
        assert not other.value.is_out_of_memory


def test_a_snapshot_is_written_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(device_type: str, file: Path) -> bool:
        file.write_bytes(b"")
        return True

    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(of_launchers, "dump_allocator", dump)
    folder = tmp_path / "out_of_memory"
    for number in range(6):
        monkeypatch.setattr(of_launchers.os, "getpid", lambda number=number: number)
        text = want_of_memory(OUT, rlcore.get_device("cpu"))
    assert f"A snapshot of its allocator is in {folder / 'cpu-0-5.pickle'}: open it at" in text
    assert len(list(folder.iterdir())) == 4 and (folder / "cpu-0-5.pickle").exists()


def test_facts_of_a_device_that_is_here() -> None:
    assert as_planned(rlcore.get_device("cpu")).arch == 0
