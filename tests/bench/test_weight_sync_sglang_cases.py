"""The cases with real SGLang: what they need of it, and, where it is installed, a whole one on the host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rlcore.bench.case import load_cases
from rlcore.bench.cases.peers.vllm_pair import EnginePair
from rlcore.errors import MissingDependencyError
from rlcore.registry import get_device


def test_what_is_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    for name in ("7b", "30b_a3b"):
        with pytest.raises(MissingDependencyError, match="sglang"):
            load_cases()[f"weight_sync/sglang/{name}"].prepare(get_device("cpu"))


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of SGLang on a CPU; on a GPU the case itself is run")
@pytest.mark.timeout(600)
def test_a_whole_case(short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    work = load_cases()["weight_sync/sglang/7b"].prepare(get_device("cpu"))
    assert work.close is not None
    try:
        ways = {contender.implementation: contender for contender in work.contenders}
        assert list(ways) == ["sync", "packed", "sglang_tensors", "tokens", "sglang_tokens"]
        for name, way in ways.items():
            for _ in range(2):
                done = way.run()
                way.check(done)
                assert way.seconds is not None and way.quantities is not None
                print(name, way.seconds(done), way.quantities(done))
        with pytest.raises(AssertionError, match="7 tokens came"):
            ways["tokens"].check(done._replace(result=7))
        monkeypatch.setattr(EnginePair, "step", lambda pair: setattr(pair, "state", pair.state ^ 1))
        with pytest.raises(AssertionError, match="other weights than a round before"):
            ways["sync"].check(ways["sync"].run())
    finally:
        work.close()
