"""What a train engine writes and reads: checkpoints, exports and state_dict, of one worker and of several."""

from __future__ import annotations

import io
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import CheckpointError, InvalidInputError, StateError, WorkerDiedError
from rlcore.ops import ppo_clip

from .plain_training import Truth
from .train_batches import assert_same_weights, packed_batch, padded_batch
from .train_policy import Build, Regression, regression_weights, truth_of


def module_of(engine: rlcore.TrainEngine) -> Any:
    return engine.executors[0].workers[0].worker.module


# ----------------------------------------------------------------------------------------------------------- one worker


def test_resume_is_exact(policy: Any, qwen2_folder: Path, tmp_path: Path) -> None:
    def fresh() -> rlcore.TrainEngine:
        with rlcore.meta_device():
            module = policy.from_pretrained(qwen2_folder)
        return rlcore.TrainEngine(module).build(devices="cpu")

    with fresh() as first:
        first.train_batch(padded_batch(), ppo_clip())
        first.save(tmp_path / "checkpoint", {"step": 1})
        noise = torch.rand(3)
        expected = [first.train_batch(padded_batch(seed=seed), ppo_clip()) for seed in range(3)]
    with fresh() as second:
        assert second.load(tmp_path / "checkpoint") == {"step": 1}
        assert torch.equal(torch.rand(3), noise)
        assert [second.train_batch(padded_batch(seed=seed), ppo_clip()) for seed in range(3)] == expected
        second.meta()
        second.onload("weights")
        second.load(tmp_path / "checkpoint")
        second.onload()
        assert second.train_batch(padded_batch(seed=0), ppo_clip()) == expected[0]


def test_a_checkpoint_of_another_model_is_refused(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.save(tmp_path)
    with rlcore.meta_device():
        module = Regression(regression_weights())
    with rlcore.TrainEngine(module) as other:
        other.build(devices="cpu")
        with pytest.raises(CheckpointError, match=r"of another model than Regression: missing: embed\.weight"):
            other.load(tmp_path)


def test_missing_and_damaged_checkpoints_are_refused(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no complete checkpoint in {tmp_path}"):
        engine.load(tmp_path)
    engine.save(tmp_path)
    weights = next(tmp_path.glob("*/weights-*"))
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"the checkpoint {tmp_path} is damaged"):
        engine.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"the checkpoint {tmp_path} is damaged"):
        engine.load(tmp_path)


def test_what_json_cannot_hold_is_refused_before_writing(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"save\(\) cannot keep extra\['step'\] = <object object"):
        engine.save(tmp_path, {"step": object()})
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_options_of_a_wrong_kind(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"blocking": None}, "takes True or False as blocking, got None"),
        ({"blocking": "no"}, "takes True or False as blocking, got 'no'"),
        ({"extra": "abc"}, "takes a dict, or None as extra, got 'abc'"),
        ({"extra": [1]}, r"takes a dict, or None as extra, got \[1\]"),
    ]
    for given, message in cases:
        with pytest.raises(InvalidInputError, match=rf"save\(\) {message}"):
            engine.save(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_previous_checkpoint(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.save(tmp_path, {"step": 1})
    files = sorted(path.name for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .* is intact"):
            engine.save(tmp_path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert engine.load(tmp_path) == {"step": 1}


def test_an_export_is_a_hugging_face_folder(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    engine.train_batch(padded_batch(), ppo_clip())
    for _ in range(2):  # the second replaces the first
        engine.export(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is Qwen2ForCausalLM
    assert_same_weights({name: loaded.get_parameter(name) for name in engine.state_dict()}, engine.state_dict())
    assert (tmp_path / "model" / "tokenizer.json").exists()
    assert rlcore.InferenceEngine(tmp_path / "model").build(devices="cpu").generate(["1+1="], {"temperature": 0})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="is not empty, and no export of rlcore wrote it"):
        engine.export(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"cannot write the model to .*notes.txt: .*Not a directory"):
        engine.export(tmp_path / "other" / "notes.txt")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_state_dict_round_trip(build: Build, workers: int) -> None:
    engine = build(workers)
    state = engine.state_dict()
    engine.train_batch(padded_batch(), ppo_clip())
    assert not torch.equal(engine.state_dict()["model.norm.weight"], state["model.norm.weight"])
    engine.load_state_dict(state)
    assert_same_weights(engine.state_dict(), state)
    with pytest.raises(InvalidInputError, match=r"missing: model\.norm\.weight"):
        engine.load_state_dict({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    whole = {name: tensor.to(torch.int8) for name, tensor in state.items()}
    with pytest.raises(InvalidInputError, match=r"does not round .* from torch\.int8 to torch\.float32; convert it"):
        engine.load_state_dict(whole)
    assert_same_weights(engine.state_dict(), state)
    with pytest.raises(
        InvalidInputError, match=r"state_dict\(\) takes 'merged', 'base' or 'only' as adapters, got 'onyl'"
    ):
        engine.state_dict(adapters="onyl")  # type: ignore[arg-type]


def test_restart_brings_the_last_checkpoint_back(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.train_batch(padded_batch(), ppo_clip())
    engine.save(tmp_path / "checkpoint", {"step": 1})
    saved = engine.state_dict()
    following = engine.train_batch(padded_batch(seed=1), ppo_clip())
    engine.restart()
    assert engine.state == {"weights": "loaded", "optimizer": "loaded", "grads": "loaded"}
    assert_same_weights(engine.state_dict(), saved)
    assert engine.train_batch(padded_batch(seed=1), ppo_clip()) == following, "the optimizer's state too"


@pytest.mark.slow
def test_a_killed_worker_comes_back_with_the_last_checkpoint(
    tmp_path: Path, short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    with rlcore.meta_device():
        module = Regression(regression_weights())
    with rlcore.TrainEngine(module).build(devices="cpu:7", launcher="process") as engine:
        engine.train_batch(padded_batch(), ppo_clip())
        engine.save(tmp_path / "checkpoint", {"step": 1})
        saved = engine.state_dict()
        following = engine.train_batch(padded_batch(seed=1), ppo_clip())
        os.kill(engine.executors[0].workers[0].process_id, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"the worker of rank 0 \(cpu:7\) was killed by SIGKILL"):
            engine.train_batch(padded_batch(), ppo_clip())
        with pytest.raises(StateError, match=r"train_step\(\) is refused: .* call restart\(\)"):
            engine.train_batch(padded_batch(), ppo_clip())
        engine.restart()
        assert_same_weights(engine.state_dict(), saved)
        assert engine.train_batch(padded_batch(seed=1), ppo_clip()) == following, "momentum too"


def test_checkpoints_do_not_need_the_gradients(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.train_batch(padded_batch(), ppo_clip())
    engine.call("accumulate", 3)
    engine.offload("grads")
    engine.save(tmp_path)
    engine.load(tmp_path)
    with pytest.raises(
        StateError, match=r"the grads of this Policy are offloaded; call the engine's onload\('grads'\)"
    ):
        module_of(engine).optimizer.step()


def test_a_save_leaves_other_peoples_files(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    for _ in range(2):
        engine.save(tmp_path)
    assert (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert len(list(tmp_path.glob("data-*/weights-*"))) == 1


def test_a_refused_load_changes_nothing(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.save(tmp_path)
    engine.train_batch(padded_batch(), ppo_clip())
    before = engine.state_dict()
    module = module_of(engine)
    first, *rest = module.parameters()
    module.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    with pytest.raises(CheckpointError, match="optimizer of the checkpoint has groups of"):
        engine.load(tmp_path)
    del module.scheduler
    with pytest.raises(
        CheckpointError, match=r"the checkpoint has the schedulers \['scheduler'\]; the module has \[\]"
    ):
        engine.load(tmp_path)
    assert_same_weights(engine.state_dict(), before)


# ------------------------------------------------------------------------------------------------------ several workers


@pytest.fixture
def is_said(errors: io.StringIO, caplog: pytest.LogCaptureFixture) -> Callable[[str, float], bool]:
    """``is_said(text, within_s)``: whether the user reads it; what workers elsewhere say comes through a pipe."""

    def wait(text: str, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not (found := text in errors.getvalue() + caplog.text) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    return wait


def next_steps(
    engine: rlcore.TrainEngine, truth: Truth | None = None, seeds: tuple[int, ...] = (7, 8)
) -> list[dict[str, float]]:
    """Metrics, which are those of ``truth`` where it goes along."""
    found = []
    for seed in seeds:
        found.append(engine.train_batch(packed_batch(seed=seed), ppo_clip()))
        if truth is not None:
            truth.assert_step(found[-1], packed_batch(seed=seed), ppo_clip())
    return found


@pytest.mark.parametrize(
    "numbers",
    [(2, 1), *(pytest.param(numbers, marks=pytest.mark.slow) for numbers in ((2, 2), (1, 3), (3, 2)))],
)
def test_a_checkpoint_resumes_on_any_number_of_workers(
    build: Build, truth: Truth, tmp_path: Path, numbers: tuple[int, int], is_said: Callable[[str, float], bool]
) -> None:
    written, read = numbers
    first, second = build(written), build(read)
    next_steps(first, truth, seeds=(1, 2))
    first.save(tmp_path, {"step": 2})
    state = first.state_dict()
    expected = [first.train_batch(packed_batch(seed=seed), ppo_clip()) for seed in (7, 8)] if first is second else None
    assert second.load(tmp_path) == {"step": 2}
    assert_same_weights(second.state_dict(), state)
    is_other = written != read
    assert is_said("random generators start from new seeds", 60.0 if is_other else 0.0) == is_other
    following = next_steps(second, truth)
    assert following == expected or is_other, "to the bit, on as many"
    weights = sum(path.stat().st_size for path in tmp_path.glob("*/weights-*"))
    whole = sum(tensor.nbytes for tensor in state.values())
    assert whole < weights < 1.2 * whole + 20_000, "every part once"


@pytest.mark.multigpu
def test_a_checkpoint_of_gpus_resumes_on_the_host(
    build: Build, policy: Any, qwen2_folder: Path, tmp_path: Path
) -> None:
    first, second, truth = build(2, "cuda"), build(2), truth_of(policy, qwen2_folder, "cuda")
    next_steps(first, truth, seeds=(1, 2))
    pending = first.save(tmp_path, blocking=False)
    next_steps(first)
    assert pending.result(timeout_s=300) > 0
    second.load(tmp_path)
    next_steps(second, truth)


@pytest.mark.slow
def test_replicas_write_a_part_once(build: Build, tmp_path: Path) -> None:
    engine = build(2, replicas=2)
    engine.save(tmp_path)
    state = engine.state_dict()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/weights-*")) < 1.2 * sum(
        tensor.nbytes for tensor in state.values()
    )
    next_steps(engine)
    engine.load(tmp_path)
    assert_same_weights(engine.state_dict(), state)


def test_random_states_are_those_of_each_rank(build: Build, tmp_path: Path) -> None:
    engine = build(2)
    engine.save(tmp_path)
    noise = engine.noise()
    assert noise[0] != noise[1]
    assert engine.noise() != noise
    engine.load(tmp_path)
    assert engine.noise() == noise


def test_one_worker_that_cannot_write_stops_all(build: Build, tmp_path: Path) -> None:
    engine = build(2)
    engine.save(tmp_path, {"step": 1})
    files = sorted(path.name for path in tmp_path.iterdir())
    engine.limit_file_size(rlcore.NeedParallel([None, 1000]))
    try:
        refused = rf"^cannot write the checkpoint {tmp_path}: rank 1: .*File too large; the previous .* is intact"
        with pytest.raises(CheckpointError, match=refused):
            engine.save(tmp_path, {"step": 2})
    finally:
        engine.limit_file_size([None])
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert engine.load(tmp_path) == {"step": 1}


def test_damage_that_one_worker_finds_is_refused_by_all(build: Build, tmp_path: Path) -> None:
    engine = build(2)
    next_steps(engine, seeds=(1, 2))
    engine.save(tmp_path, {"step": 2})
    next_steps(engine, seeds=(3,))
    state = engine.state_dict()
    for name in ("weights", "optimizer"):
        file = next(tmp_path.glob(f"*/{name}-1.safetensors"))  # the second worker's to check
        good = file.read_bytes()
        file.write_bytes(good[:-3] + bytes([good[-3] ^ 4]) + good[-2:])
        with pytest.raises(CheckpointError, match=rf"{tmp_path} is damaged: .*{name}-1\.safetensors: the data of "):
            engine.load(tmp_path)
        assert_same_weights(engine.state_dict(), state)
        file.write_bytes(good)
    file.write_bytes(file.with_name("optimizer-0.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"optimizer-1\.safetensors: it is optimizer-0\.safetensors of the save"):
        engine.load(tmp_path)
    file.write_bytes(good)
    noise, expected = engine.noise(), next_steps(engine)
    assert engine.load(tmp_path) == {"step": 2}
    next_steps(engine, seeds=(3,))
    assert engine.noise() == noise and next_steps(engine) == expected, "refusals have changed nothing"


@pytest.mark.slow
def test_workers_save_in_the_background(build: Build, tmp_path: Path) -> None:
    engine = build(2)
    next_steps(engine, seeds=(1, 2))
    pending = engine.save(tmp_path, {"step": 2}, blocking=False)
    expected = next_steps(engine)
    assert pending.result(timeout_s=300) > 0 and pending.done()
    assert engine.load(tmp_path) == {"step": 2}
    assert next_steps(engine) == expected, "exactly"


def test_one_worker_that_cannot_write_in_the_background(build: Build, tmp_path: Path) -> None:
    engine = build(2)
    engine.save(tmp_path, {"step": 1})
    engine.limit_file_size(rlcore.NeedParallel([None, 1000]))
    try:
        pending = engine.save(tmp_path, {"step": 2}, blocking=False)
        next_steps(engine)
        with pytest.raises(
            CheckpointError, match=rf"checkpoint {tmp_path}: rank 1: .*File too large; the prev.* intact"
        ):
            pending.result(timeout_s=300)
    finally:
        engine.limit_file_size([None])
    assert len(list(tmp_path.iterdir())) == 2
    assert engine.load(tmp_path) == {"step": 1}


def test_an_export_that_does_not_fit_fails_on_the_worker_that_writes_and_holds_nobody_up(
    build: Build, tmp_path: Path
) -> None:
    engine = build(2)
    engine.export(tmp_path / "model")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    engine.limit_file_size([10_000])
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the model to .*File too large"):
            engine.export(tmp_path / "model", max_shard_bytes=20_000)
    finally:
        engine.limit_file_size([None])
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "model"], "no temporary folder is left"


def test_an_export_of_several_workers_is_a_hugging_face_folder(build: Build, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    engine = build(2)
    next_steps(engine)
    engine.export(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is Qwen2ForCausalLM
    state = engine.state_dict()
    assert_same_weights({name: loaded.get_parameter(name).detach() for name in state}, state)
