"""The cases with real SGLang: what they need of it, and, where it is installed, a whole one on the host."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.bench.case import load_cases
from rlcore.bench.cases.models import TINY
from rlcore.bench.cases.peers import sglang, sglang_alone, vllm_pair
from rlcore.bench.cases.peers.sglang_alone import SglangAlone
from rlcore.bench.cases.peers.vllm_pair import EnginePair
from rlcore.errors import BenchError, MissingDependencyError, UnsupportedError
from rlcore.registry import get_device


def test_what_is_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(MissingDependencyError, match="sglang"):
        load_cases()["weight_sync/sglang/7b"].prepare(get_device("cpu"))


def test_an_error_of_sglang_alone_is_sent_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EOFError of its own is what SGLang raises where a scheduler dies."""

    def fail(*_: object) -> None:
        raise EOFError("a scheduler died")

    monkeypatch.setattr(sglang_alone.versions, "prepare", fail)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        with pytest.raises(EOFError):
            sglang_alone._serve(theirs, tmp_path, "cpu", "cpu", {})
        assert ours.recv() == ("EOFError: a scheduler died", None)


def test_the_weights_that_sglang_alone_takes_are_not_zeros(tmp_path: Path) -> None:
    """The folder's are."""
    vllm_pair.write_folder(vllm_pair.policy(TINY, "cpu"), tmp_path)
    found = sglang_alone._new_weights(tmp_path, torch.device("cpu"))
    assert found and all(tensor.any() for _, tensor in found)


def test_a_device_that_is_not_there_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.17"))  # type: ignore[arg-type]
    device = get_device("cpu")
    monkeypatch.setattr(type(device), "count", lambda device: 1)
    with pytest.raises(UnsupportedError, match="this case on cpu:0 is not supported: it takes cpu:1 too"):
        load_cases()["weight_sync/sglang/7b_1_to_1"].prepare(device)


def test_new_weights_are_on_the_samplers_device_or_the_next() -> None:
    device: Any = SimpleNamespace(name="cuda:1", index=1, count=lambda: 3, spec=SimpleNamespace(name="cuda"))
    assert [sglang._source_of(device, steps_on) for steps_on in (0, 1)] == ["cuda:1", "cuda:2"]


def test_sglang_that_refuses_is_heard_while_our_part_waits_for_it() -> None:
    refused, waited = threading.Event(), []
    found = sglang_alone._Broadcast._beside(lambda: waited.append(refused.wait(5)), lambda: (False, "no group"))
    refused.set()
    assert found == (False, "no group") and not waited


def test_what_fails_in_our_part_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        sglang_alone._Broadcast._beside(lambda: 1 / 0, lambda: (True, ""))  # type: ignore[arg-type,return-value]


@pytest.mark.slow
def test_sglang_alone_that_fails_or_hangs_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_alone, "_CLOSE_S", 0.1)
    monkeypatch.setattr(sglang_alone, "_serve", fail_and_hang)
    with pytest.raises(BenchError, match="SGLang alone has failed: no memory"):
        SglangAlone(tmp_path, "cpu", "cpu", {})
    assert multiprocessing.active_children() == []


def fail_and_hang(connection: Any, *_: object) -> None:
    """Play the process of an SGLang whose end never comes."""
    connection.send(("no memory", None))
    time.sleep(600)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of SGLang on a CPU; on a GPU the case itself is run")
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("7b", ["sync", "packed", "tokens"]),
        ("7b_alone", ["sglang_tensors", "sglang_tokens"]),
        ("7b_1_to_1", ["sync", "collective", "tokens"]),
        ("7b_1_to_1_alone", ["sglang_distributed", "sglang_tokens"]),
    ],
)
@pytest.mark.timeout(600)
def test_a_whole_case(
    case: str, expected: list[str], short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    work = load_cases()[f"weight_sync/sglang/{case}"].prepare(get_device("cpu"))
    assert work.close is not None
    try:
        ways = {contender.implementation: contender for contender in work.contenders}
        assert list(ways) == expected
        for name, way in ways.items():
            for _ in range(2):
                done = way.run()
                way.check(done)
                assert way.seconds is not None and way.quantities is not None
                print(name, way.seconds(done), way.quantities(done))
        with pytest.raises(AssertionError, match="7 tokens came"):
            way.check(done._replace(result=7))
        if "sync" not in ways:
            return
        monkeypatch.setattr(EnginePair, "step", lambda pair: setattr(pair, "state", pair.state ^ 1))
        with pytest.raises(AssertionError, match="other weights than a round before"):
            ways["sync"].check(ways["sync"].run())
    finally:
        work.close()
