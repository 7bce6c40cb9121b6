"""New weights: by weight syncs of every route, and from folders. None is half new, and versions are told."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.conformance.promise import by_route, promise
from rlcore.conformance.reference import SamplerTruth
from rlcore.conformance.tiny_model import damaged_copy, write_tiny_model
from rlcore.conformance.under_test import UnderTest
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.errors import CheckpointError, RlcoreError, StateError, SyncError

PARAMS = {"max_tokens": 10, "ignore_eos": True, "n": 2, "seed": 3}
ANY_ROUTE = tuple(f"sync_call ({route})" for route in ("local", "packed"))


def versions(outputs: Any) -> set[Any]:
    return {span.version for output in outputs for one in output.outputs for span in one.version_spans}


@contextmanager
def failing_midway(train: Any) -> Iterator[None]:
    """Weight syncs of this trainer fail when everything has been written and nothing is committed."""
    (worker,) = train.executors[0].workers
    real = worker.worker.sync_call

    def sync_call(method: str, calls: Any) -> Any:
        if method == "end":
            raise SyncError("planted by the suite")
        return real(method, calls)

    worker.worker.sync_call = sync_call
    try:
        yield
    finally:
        del worker.worker.sync_call


@by_route("After a sync the engine samples from the trainer's weights, every tensor of them, and says their version.")
def test_a_sync_brings_all_weights(request: Any, train: Any, weights: Any, prompts: Any, route: str) -> None:
    engine = request.getfixturevalue("infer" if route == "local" else "apart")
    for seed in (1, 2):
        train.load_state_dict(weights.of(seed))
        report = train.sync_weights(engine, route=route, version=40 + seed)
        assert (report.route, report.version, engine.version) == (route, 40 + seed, 40 + seed)
        outputs = engine.generate(prompts, PARAMS)
        assert weights.truth(seed).wrong(outputs) == "", "the weights in use are not the trainer's"
        assert versions(outputs) == {40 + seed}


@promise("A sync can compare every byte with what the executor's own loader makes of the same weights.", *ANY_ROUTE)
def test_a_sync_is_verified(infer: Any, train: Any, weights: Any, prompts: Any) -> None:
    train.load_state_dict(weights.of(1))
    train.sync_weights(infer, verify=True)
    assert weights.truth(1).wrong(infer.generate(prompts, PARAMS)) == ""


@promise("A staged sync ends with the new weights, as one in place does.", *ANY_ROUTE)
def test_a_staged_sync_brings_all_weights(infer: Any, train: Any, weights: Any, prompts: Any) -> None:
    train.sync_weights(infer)
    train.load_state_dict(weights.of(2))
    train.sync_weights(infer, staged=True)
    assert weights.truth(2).wrong(infer.generate(prompts, PARAMS)) == ""


@promise("A sync fills weights that were released.", *ANY_ROUTE)
def test_a_sync_fills_released_weights(infer: Any, train: Any, weights: Any, prompts: Any) -> None:
    infer.meta("weights")
    infer.onload("weights")
    train.load_state_dict(weights.of(1))
    train.sync_weights(infer)
    assert infer.state["weights"] == "loaded"
    assert weights.truth(1).wrong(infer.generate(prompts, PARAMS)) == ""


@promise("Requests that a sync finds under way say of each token which weights made it.", "collect", *ANY_ROUTE)
def test_tokens_say_their_version(infer: Any, train: Any, weights: Any, prompts: Any) -> None:
    train.load_state_dict(weights.of(1))
    train.sync_weights(infer, version=7)
    numbers = infer.submit(prompts, PARAMS)
    infer.pause("keep")
    train.load_state_dict(weights.of(2))
    train.sync_weights(infer, version=8)
    infer.resume()
    found: dict[int, Any] = {}
    while len(found) < len(numbers):
        found |= infer.collect(timeout_s=60.0)
    for output in found.values():
        for completion in output.outputs:
            spans = completion.version_spans
            assert spans, "a completion without version_spans"
            assert spans[0].start == 0 and spans[-1].end == len(completion.token_ids)
            assert all(before.end == after.start for before, after in itertools.pairwise(spans))
            versions = [span.version for span in spans]
            assert versions in ([7], [8], [7, 8]), f"versions {versions} of weights 7, and then 8"
    assert_spans(found.values(), {7: weights.truth(1), 8: weights.truth(2)})


def assert_spans(outputs: Any, truths: dict[int, SamplerTruth]) -> None:
    """Completions of one version have its log-probs: what a KV cache of two versions gives is nobody's."""
    for version, truth in truths.items():
        own = [one for one in outputs if versions([one]) == {version}]
        assert not own or truth.wrong(own) == "", f"tokens that version {version} is said to have made are not its"


@promise(
    "A sync that fails after the first byte poisons the engine; a complete one, or a load, makes it whole.", *ANY_ROUTE
)
def test_a_failed_sync_poisons_until_a_complete_one(infer: Any, train: Any, weights: Any, prompts: Any) -> None:
    for new, mend, then in ((1, lambda: train.sync_weights(infer), 1), (2, infer.load, 0)):
        train.load_state_dict(weights.of(new))
        with failing_midway(train), pytest.raises(SyncError, match=r"stopped midway: planted by the suite"):
            train.sync_weights(infer)
        assert infer.sync_state == "poisoned"
        uses = (lambda: infer.generate(prompts), lambda: infer.submit(prompts), lambda: infer.onload("kv_cache"))
        for use in uses:
            with pytest.raises(StateError, match=r"is refused: a weight sync stopped midway"):
                use()
        mend()
        assert infer.sync_state == "serving"
        assert weights.truth(then).wrong(infer.generate(prompts, PARAMS)) == ""


@promise("A trainer of another model is refused before anything is written.", *ANY_ROUTE)
def test_another_model_is_refused(
    infer: Any, under_test: UnderTest, prompts: Any, truth: SamplerTruth, tmp_path: Path
) -> None:
    other = write_tiny_model(tmp_path / "other", hidden_size=32, num_hidden_layers=1)
    with under_test.train(other, launcher="inline") as engine, pytest.raises(SyncError):
        engine.sync_weights(infer)
    assert infer.sync_state == "serving", "nothing was written"
    assert truth.wrong(infer.generate(prompts, PARAMS)) == ""


# ----------------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="session")
def newer(folder: Path, weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the same model with the weights of seed 5."""
    return with_weights(folder, weights.of(5), tmp_path_factory.mktemp("newer") / "model")


def with_weights(folder: Path, weights: Mapping[str, Tensor], path: Path) -> Path:
    """A folder of the same model with these weights."""
    from safetensors.torch import save_file

    shutil.copytree(folder, path)
    for file in check_model_folder(folder).weight_files:
        (path / file.name).unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(dict(weights), path / "model.safetensors", {"format": "pt"})
    return path


@promise(
    "load(path) takes all weights of another folder of the same model, and load() the first one's.", "take_weights"
)
def test_a_folder_is_loaded(infer: Any, newer: Path, weights: Any, prompts: Any) -> None:
    infer.load(newer)
    assert infer.version == 1
    outputs = infer.generate(prompts, PARAMS)
    assert weights.truth(5).wrong(outputs) == ""
    assert versions(outputs) == {1}
    infer.load()
    assert weights.truth(0).wrong(infer.generate(prompts, PARAMS)) == ""


@promise("A folder that is damaged, or of another model, is refused and changes nothing.", "read_weights")
def test_a_bad_folder_is_refused(infer: Any, newer: Path, prompts: Any, truth: SamplerTruth, tmp_path: Path) -> None:
    damaged = damaged_copy(newer, tmp_path / "damaged")
    other = write_tiny_model(tmp_path / "other", hidden_size=32, num_hidden_layers=1)
    for path, kind in ((tmp_path / "absent", CheckpointError), (damaged, CheckpointError), (other, SyncError)):
        with pytest.raises(kind):
            infer.load(path)
        assert (infer.sync_state, infer.version) == ("serving", 0), f"after {path.name}"
    assert truth.wrong(infer.generate(prompts, PARAMS)) == ""


@promise(
    "Weights that are no numbers end in an error, never in tokens, and the engine goes on with others.", "generate"
)
def test_weights_that_are_no_numbers_give_no_tokens(
    infer: Any, folder: Path, weights: Any, prompts: Any, tmp_path: Path
) -> None:
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.of(0).items()}
    path = with_weights(folder, broken, tmp_path / "broken")
    with pytest.raises(RlcoreError):  # at the one or the other
        infer.load(path)
        infer.generate(prompts, PARAMS)
    infer.load()
    assert weights.truth(0).wrong(infer.generate(prompts, PARAMS)) == ""
