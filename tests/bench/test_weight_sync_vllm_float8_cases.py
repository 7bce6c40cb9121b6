"""The cases of syncs into a vLLM in float8: sizes, buffers, checks; and, where vLLM is installed, one in bfloat16."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rlcore.bench.case import Work, load_cases
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B
from rlcore.bench.cases.peers import vllm_float8
from rlcore.engines.inference import InferenceEngine
from rlcore.errors import MissingDependencyError
from rlcore.registry import get_device

GIB = 1 << 30


def test_a_case_for_each_model_and_way_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name in load_cases() if name.startswith("weight_sync/vllm_float8/")}
    kept = ("bfloat16", "fp8_per_block", "fp8_per_tensor")
    assert names == {f"weight_sync/vllm_float8/{model}_{one}" for model in ("7b", "30b_a3b") for one in kept}
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match="vllm"):
        load_cases()[names.pop()].prepare(get_device("cpu"))


def test_a_build_that_fails_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = vllm_float8.Float8Pair.close
    monkeypatch.setattr(vllm_float8.Float8Pair, "close", lambda pair: closed.append(close(pair)))
    monkeypatch.setattr(InferenceEngine, "build", lambda *_, **__: 1 / 0)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32"))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        load_cases()["weight_sync/vllm_float8/7b_bfloat16"].prepare(get_device("cpu"))
    assert len(closed) == 1


def test_layers_are_cut_where_two_copies_have_no_room_and_the_name_says_so() -> None:
    assert vllm_float8.fitting(QWEN_7B, 78 * GIB) == QWEN_7B
    assert vllm_float8.fitting(QWEN_30B_A3B, 139 * GIB) == QWEN_30B_A3B
    cut = vllm_float8.fitting(QWEN_30B_A3B, 78 * GIB)
    assert 24 <= cut.layers < 32 and cut.name == f"qwen3-30b-a3b, {cut.layers} layers"
    with torch.device("meta"):
        config = cut.config()
        from transformers import AutoModelForCausalLM

        parameters = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    assert 0.84 * 78 * GIB < 2 * 2 * parameters < 0.89 * 78 * GIB


def test_weights_go_to_vllms_loader_in_runs_that_fit_the_buffer() -> None:
    named = [(name, torch.empty(size)) for name, size in (("a", 3), ("b", 3), ("c", 1), ("d", 7), ("e", 1))]
    runs = [[name for name, _ in part] for part in vllm_float8._parts(named, 7)]
    assert runs == [["a", "b", "c"], ["d"], ["e"]]


def test_a_sync_that_falls_back_to_vllms_loader_fails_and_one_by_plan_records_that_it_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32"))  # type: ignore[arg-type]
    monkeypatch.setattr(vllm_float8, "Float8Pair", lambda *_: MagicMock())
    way = vllm_float8._prepare(QWEN_7B, None, get_device("cpu")).contenders[0]
    report: Any = SimpleNamespace(route="direct", fallback_bytes=0)
    for state in (0, 1):
        done = vllm_float8.WholeSync(1.0, state, [{"weight": state}], report)
        way.check(done)
    assert {name: one.value for name, one in way.quantities(done).items()} == {"route_direct": 1, "by_vllms_loader": 0}
    report.fallback_bytes = 5
    with pytest.raises(AssertionError, match="5 bytes of a sync by plan went through vLLM's own loader"):
        way.check(done)


@pytest.fixture(scope="module")
def work(settings_of_vllm: pytest.MonkeyPatch) -> Iterator[Work]:
    settings_of_vllm.setattr(vllm_float8, "_PART", 1 << 17)
    found = vllm_float8._prepare(QWEN_30B_A3B, None, get_device("cpu"))
    yield found
    assert found.close is not None
    found.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's build for the CPU; on a GPU the case itself is run")
@pytest.mark.timeout(600)
def test_a_sync_leaves_what_vllms_own_loader_leaves(work: Work) -> None:
    states = []
    for way in work.contenders:
        done = way.run()
        way.check(done)
        states.append(done.state)
        assert way.seconds is not None and way.seconds(done) > 0
        wrong = [{key: value + 1 for key, value in done.sums[0].items()}]
        with pytest.raises(AssertionError, match="not those that another way has made"):
            way.check(done._replace(sums=wrong))
    assert [way.implementation for way in work.contenders] == ["turn", "again", "vllms_loader"]
    assert set(states) == {0, 1}
