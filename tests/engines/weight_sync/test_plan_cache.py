"""Plans that a self-test has proven serve later programs, and nothing that is damaged, foreign or of another engine."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_engine import Checkpoint, Sizes, SmallModel, SmallTarget, checkpoint, expected
from torch import nn

from rlcore.engines.weight_sync.channels.peers import LocalPeers
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.planning import module_identity as identities
from rlcore.engines.weight_sync.planning import plan_cache, planner
from rlcore.engines.weight_sync.planning.module_identity import module_identity
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.registry import get_device

SIZES = Sizes(layers=1, experts=2, has_state=True)


class Identified(SmallTarget):
    text: str | None = "a small engine"

    def identity(self) -> str | None:
        return self.text


class Program:
    """A trainer and the two shards of an engine, as a new program makes them."""

    def __init__(self, seed: int = 1, texts: tuple[str | None, str | None] = ("a small engine", "a small engine")):
        weights = checkpoint(SIZES, seed=seed)
        self.module = Checkpoint(weights)
        for name, parameter in self.module.named_parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(weights[name].clone()))
        self.weights = weights
        self.models = [SmallModel(SIZES, shard, 2, torch.float32) for shard in range(2)]
        self.receivers = [self._receiver(shard, text) for shard, text in enumerate(texts)]
        self.sender = Sender(ModuleSourceTensors(self.module, 1), get_device("cpu"))
        self.session = SyncSession(LocalPeers("the trainer", [self.sender]), LocalPeers("the engine", self.receivers))

    def _receiver(self, shard: int, text: str | None) -> Receiver:
        worker: Any = SimpleNamespace(
            device=get_device("cpu"),
            model=self.models[shard],
            versions=[],
            new_model=lambda: SmallModel(SIZES, shard, 2, torch.float32),
        )
        target = Identified(worker)
        target.text = text
        return Receiver(target)

    def sync(self) -> None:
        """The first round, after which every tensor is as a fresh engine's."""
        self.session.run(RoundOptions(version=1, staging_bytes=4096), nullcontext)
        for model, wanted in zip(self.models, expected(self.weights, SIZES, 2, torch.float32), strict=True):
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.named_parameters())
        for end in (*self.receivers, self.sender):
            end.close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    return tmp_path / "sync-plans"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note in a list what planners do: "trace" and "test"."""
    done: list[str] = []

    def note(name: str, word: str) -> None:
        real = getattr(planner, name)
        monkeypatch.setattr(planner, name, lambda *args, **kwargs: (done.append(word), real(*args, **kwargs))[1])

    note("trace_loader", "trace")
    note("run_self_test", "test")
    return done


FIRST = ["trace", "trace", "test", "test"]


def test_a_second_program_neither_traces_nor_tests(work: list[str], folder: Path) -> None:
    Program().sync()
    assert work == FIRST
    work.clear()
    Program(seed=2).sync()
    assert work == []
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in folder.iterdir()] == [0o600] * 2


def test_what_a_plan_depends_on_is_in_its_name(work: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Program().sync()
    work.clear()
    Program(texts=("another engine", "a small engine")).sync()
    assert work == ["trace", "test"], "one is kept, the other is not: only that one is tested"
    for name, value in (("_code_digest", lambda: "other code"), ("_layouts", lambda live: ["other strides"])):
        with monkeypatch.context() as patch:
            work.clear()
            patch.setattr(plan_cache, name, value)
            Program().sync()
            assert work == FIRST, name
    with monkeypatch.context() as patch:
        work.clear()
        patch.setattr(torch, "__version__", "9.9")
        Program().sync()
        assert work == FIRST
    work.clear()
    Program(texts=(None, None)).sync()
    assert work == FIRST, "an engine that says nothing of itself"


def test_an_identity_that_fails_costs_the_cache_and_not_the_sync(
    work: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Identified) -> str:
        raise AttributeError("this engine has no such attribute")

    monkeypatch.setattr(Identified, "identity", fail)
    Program().sync()
    assert work == FIRST and not folder.exists()
    assert "this engine has no such attribute" in caplog.text


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def of_another_kind(file: Path) -> None:
    file.write_bytes(hashlib.sha256(b"\x93\x01\x02\x03").digest() + b"\x93\x01\x02\x03")


def linked(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


@pytest.mark.parametrize("harm", [flipped, cut, of_another_kind, linked], ids=lambda harm: harm.__name__)
def test_a_file_that_is_damaged_or_foreign_is_ignored_and_replaced(
    harm: Callable[[Path], None], work: list[str], folder: Path
) -> None:
    Program().sync()
    for file in list(folder.iterdir()):
        harm(file)
    work.clear()
    Program().sync()
    assert work == FIRST
    if harm is not linked:  # a link is not written through: it stays, and nothing is kept under its name
        work.clear()
        Program().sync()
        assert work == []


def test_a_folder_that_others_can_write_is_left_alone(
    work: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Program().sync()
    folder.chmod(0o777)
    work.clear()
    Program().sync()
    assert work == FIRST
    assert "is open to other users" in caplog.text and "RLCORE_CACHE" in caplog.text


def test_the_oldest_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MOST_FILES", 3)
    for number in range(3):
        Program(texts=(f"engine {number}", f"engine {number}")).sync()
    assert len(list(folder.iterdir())) == 3


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("expert_map", torch.tensor([0, -1, 1]))
        self.tp_rank = 0
        self.quant_method = type("Method", (), {})()
        self.quant_method.backend = "cutlass"


def test_the_identity_of_a_module_is_that_of_all_but_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = nn.ModuleList([Part(), Part()])
    before = module_identity(module)
    same = copy.deepcopy(module)
    nn.init.normal_(same[0].weight)
    assert module_identity(same) == before

    def changed(change: Callable[[Any], object]) -> bool:
        other = copy.deepcopy(module)
        change(other[1])
        return module_identity(other) != before

    assert changed(lambda part: setattr(part, "tp_rank", 1))
    assert changed(lambda part: setattr(part.quant_method, "backend", "marlin"))
    assert changed(lambda part: part.expert_map.add_(1))
    assert changed(lambda part: part.add_module("more", nn.ReLU()))
    edited = tmp_path / "edited.py"
    edited.write_text("# other code")
    monkeypatch.setattr(identities, "_source_file", lambda cls: str(edited) if cls is Part else None)
    assert module_identity(module) != before
