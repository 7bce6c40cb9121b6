"""Weights and KV cache leave the device and come back."""

from __future__ import annotations

from typing import Any

import pytest

from rlcore.conformance.promise import promise
from rlcore.conformance.reference import SamplerTruth
from rlcore.conformance.under_test import UnderTest, nbytes
from rlcore.errors import StateError

PARAMS = {"max_tokens": 8, "ignore_eos": True, "seed": 3}

WEIGHTS_AFTER = {
    ("loaded", "onload"): "loaded",
    ("loaded", "offload"): "offloaded",
    ("loaded", "meta"): "released",
    ("offloaded", "onload"): "loaded",
    ("offloaded", "offload"): "offloaded",
    ("offloaded", "meta"): "released",
    ("released", "onload"): "empty",
    ("released", "offload"): "there is nothing to offload",
    ("released", "meta"): "released",
    ("empty", "onload"): "empty",
    ("empty", "offload"): "have no values yet",
    ("empty", "meta"): "released",
}
"""State of the weights and move -> their state then, or what a refusal says."""
KV_CACHE_AFTER = {
    ("loaded", "onload"): "loaded",
    ("loaded", "offload"): "released",
    ("loaded", "meta"): "released",
    ("released", "onload"): "loaded",
    ("released", "offload"): "released",
    ("released", "meta"): "released",
}
"""The same of the KV cache, which is made anew: its values are worth nothing."""
WAY_TO = {"loaded": (), "offloaded": ("offload",), "released": ("meta",), "empty": ("meta", "onload")}


@promise("The report has both tags, and the bytes of the weights.", "memory_report")
def test_memory_is_reported_by_tag(infer: Any, weights: Any) -> None:
    for report in infer.memory_report():
        assert set(report["tags"]) == {"weights", "kv_cache"}
        assert report["info"].free_bytes >= 0 and report["stats"].allocated_bytes >= 0
    distinct = sum(tensor.numel() for tensor in weights.of(0).values())
    assert nbytes(infer, "weights")[0] >= distinct, "less than a byte for each weight"


@pytest.mark.parametrize("state", WAY_TO)
@pytest.mark.parametrize("move", ["onload", "offload", "meta"])
@promise("Each legal move of the weights is made, and each other one is refused.", "onload", "offload", "meta")
def test_weights_move_by_the_table(infer: Any, state: str, move: str) -> None:
    for step in WAY_TO[state]:
        getattr(infer, step)("weights")
    assert infer.state["weights"] == state
    after = WEIGHTS_AFTER[state, move]
    if after not in WAY_TO:
        with pytest.raises(StateError, match=after):
            getattr(infer, move)("weights")
        after = state
    else:
        reports = getattr(infer, move)("weights")
        assert (reports == {}) == (after == state), "a move to where it is does nothing"
    assert infer.state["weights"] == after
    on_device, on_host = nbytes(infer, "weights")
    assert (on_device > 0) == (after in ("loaded", "empty")), f"{on_device} bytes on the device when {after}"
    assert after == "offloaded" or on_host == 0, f"{on_host} bytes in host memory when {after}"
    assert after != "offloaded" or on_host > 0


@pytest.mark.parametrize(("state", "move"), KV_CACHE_AFTER)
@promise("The KV cache is released by offload as by meta, and taken back anew.", "onload", "offload", "meta")
def test_the_kv_cache_moves_by_the_table(infer: Any, state: str, move: str) -> None:
    for step in WAY_TO[state]:
        getattr(infer, step)("kv_cache")
    getattr(infer, move)("kv_cache")
    assert infer.state["kv_cache"] == KV_CACHE_AFTER[state, move]


@promise("A report of a move says what it moved and freed.", "offload", "onload")
def test_a_move_is_measured(infer: Any) -> None:
    on_device, _ = nbytes(infer, "weights")
    away = infer.offload("weights")["weights"]
    assert sum(report.moved_bytes for report in away) >= on_device * 0.5, "weights that may be shared count once"
    assert sum(report.freed_device_bytes for report in away) > 0
    back = infer.onload("weights")["weights"]
    assert sum(report.moved_bytes for report in back) == sum(report.moved_bytes for report in away)


def _sums(engine: Any) -> list[Any]:
    """Return a number of each tensor of the weights, which changes with any bit: by worker, end and name."""
    each = [group.call("sync_call", [(("sums", None), {})] * len(group.workers)) for group in engine.executors]
    return [ends for workers in each for ends in workers]


@promise("Weights come back from host memory as they were, bit for bit.", "offload", "onload")
def test_weights_come_back_as_they_were(infer: Any, prompts: Any, truth: SamplerTruth) -> None:
    before, bits = infer.generate(prompts, PARAMS), _sums(infer)
    assert all(end for ends in bits for end in ends), "an end of a weight sync has no sums: nothing would be compared"
    for _ in range(2):
        infer.offload()
        assert infer.state == {"weights": "offloaded", "kv_cache": "released"}
        infer.onload()
        assert _sums(infer) == bits
        found = infer.generate(prompts, PARAMS)
        assert truth.wrong(found) == ""
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in before]
    if not any(bits):
        pytest.skip("tokens were as before, and bits were not compared: it has no sync ends, whose sums tell them")


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
@promise(
    "Nothing is generated while weights or KV cache are away; it goes on when they are back.", "onload", "generate"
)
def test_nothing_is_generated_while_a_tag_is_away(infer: Any, prompts: Any, tag: str) -> None:
    infer.offload(tag)
    for method in ("generate", "submit"):
        with pytest.raises(StateError, match=rf"needs the {tag} .*call onload\('{tag}'\)"):
            getattr(infer, method)(prompts, PARAMS)
    infer.onload(tag)
    assert len(infer.generate(prompts, PARAMS)) == len(prompts)


@promise(
    "Released weights have no values when they are taken back, until a load or a sync fills them.", "meta", "onload"
)
def test_released_weights_are_filled_by_load(infer: Any, prompts: Any, truth: SamplerTruth) -> None:
    infer.meta("weights")
    infer.onload("weights")
    with pytest.raises(StateError, match=r"which are empty; call sync_weights\(\) into it or load\(path\)"):
        infer.generate(prompts, PARAMS)
    infer.load()
    assert truth.wrong(infer.generate(prompts, PARAMS)) == ""


@promise("An engine that is built with onload=False waits in host memory.", "build", "offload", "onload")
def test_an_engine_can_be_built_into_host_memory(under_test: UnderTest, prompts: Any, truth: SamplerTruth) -> None:
    with under_test.inference(onload=False) as engine:
        assert engine.state == {"weights": "offloaded", "kv_cache": "released"}
        assert nbytes(engine, "weights")[0] == 0
        engine.onload()
        assert truth.wrong(engine.generate(prompts, PARAMS)) == ""
