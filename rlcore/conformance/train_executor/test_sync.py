"""A sampler is given the trainer's weights, by every route."""

from __future__ import annotations

from typing import Any

import pytest

from rlcore.conformance.promise import by_route, promise
from rlcore.errors import StateError, UnsupportedError

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6]]
PARAMS = {"max_tokens": 10, "ignore_eos": True, "n": 2, "seed": 3}


@by_route("After a sync the sampler has the trainer's weights, every tensor of them, also after a further step.")
def test_a_sampler_gets_all_weights(
    *, request: Any, infer: Any, sampler_truth: Any, batch: Any, loss_fn: Any, route: str
) -> None:
    engine = request.getfixturevalue("train" if route == "local" else "apart")
    for number in range(2):
        engine.train_batch(batch, loss_fn)
        report = engine.sync_weights(infer, route=route)
        assert (report.route, infer.version) == (route, number + 1)
        assert sampler_truth(engine.state_dict()).wrong(infer.generate(PROMPTS, PARAMS)) == ""
    if route == "direct":
        engine.restart()  # a host's weights that were shared cannot be offloaded


@promise("Shards of several workers reach the sampler as whole tensors.", "several workers", "sync_call (packed)")
def test_shards_reach_the_sampler_whole(
    train_on: Any, infer: Any, sampler_truth: Any, batch: Any, loss_fn: Any
) -> None:
    engine = train_on(2)
    engine.train_batch(batch, loss_fn)
    engine.sync_weights(infer)
    assert sampler_truth(engine.state_dict()).wrong(infer.generate(PROMPTS, PARAMS)) == ""


@promise("Nothing moves when nothing has changed; what has changed in any way moves.", "sync_call (local)")
def test_a_sync_sees_what_has_changed(train: Any, infer: Any, batch: Any, loss_fn: Any) -> None:
    train.train_batch(batch, loss_fn)
    assert train.sync_weights(infer).moved_bytes > 0
    assert train.sync_weights(infer).moved_bytes == 0
    train.load_state_dict(train.initial)
    assert train.sync_weights(infer).moved_bytes > 0


@promise("Weights that are away are not sent; when they are back they are.", "sync_call (local)", "offload")
def test_weights_that_are_away_are_not_sent(
    apart: Any, infer: Any, sampler_truth: Any, batch: Any, loss_fn: Any
) -> None:
    apart.train_batch(batch, loss_fn)
    apart.sync_weights(infer)
    try:
        apart.offload("weights")
    except UnsupportedError as error:
        pytest.skip(f"offload after a sync: {error}")
    with pytest.raises(StateError, match=r"sync_weights\(\) needs the weights of the train engine"):
        apart.sync_weights(infer)
    apart.onload("weights")
    apart.train_batch(batch, loss_fn)
    apart.sync_weights(infer)
    assert sampler_truth(apart.state_dict()).wrong(infer.generate(PROMPTS, PARAMS)) == ""
