"""Checkpoints on disk: what a kill leaves, who commits, what else reads them; saves in the background."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.checkpoints import checkpoint, manifest
from rlcore.engines.checkpoints.checkpoint import Save
from rlcore.engines.checkpoints.pending_save import PendingSave
from rlcore.engines.checkpoints.saved_tensor import TensorPart, parts_of
from rlcore.engines.checkpoints.saving import Saver
from rlcore.engines.checkpoints.snapshot import Snapshot
from rlcore.engines.checkpoints.tensor_file import Stamp
from rlcore.engines.checkpoints.train_state import Captured
from rlcore.engines.offload import host_arena as arena_module
from rlcore.engines.offload.host_arena import arena_of
from rlcore.errors import CheckpointError, InvalidInputError, StateError, WorkerDiedError
from rlcore.ops import ppo_clip
from tests.engines.kills import killed_at
from tests.engines.train_policy import adamw_policy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

VOCAB = 21


# ------------------------------------------------------------------------------------------------------ on disk


def shares(folder: Path, step: int, size: int = 2) -> list[Callable[[], None]]:
    """What each of ``size`` workers does in a save of a vector [1000 * size] that is ``step`` everywhere."""

    def share(rank: int) -> Callable[[], None]:
        stamp = Stamp(f"{step:012x}")
        save = Save(folder, stamp, rank=rank, size=size, groups=["weights", "rng"], state={"step": step})
        part = TensorPart(torch.full((1000,), float(step)), [1000 * rank], [1000 * size])

        def write() -> None:
            with save.held():
                save.write({"weights": {"w": part}, "rng": parts_of({f"rank-{rank}-x": torch.tensor(step)})})

        return write

    return [share(rank) for rank in range(size)]


def saved_step(folder: Path) -> int:
    found = checkpoint.read(folder)
    step: int = found.state["step"]
    assert found.tensors["weights"]["w"].shape == (2000,)
    assert set(found.tensors["weights"]["w"].read().tolist()) == {step}
    assert [int(found.tensors["rng"][f"rank-{rank}-x"].read()) for rank in (0, 1)] == [step, step]
    return step


def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    for write in shares(tmp_path, 1):
        write()
    expected, step, number = 1, 1, 0
    outcomes = []
    is_killed = True
    while is_killed:
        step, number = step + 1, number + 1
        is_killed = killed_at(number, lambda step=step: [write() for write in shares(tmp_path, step)])  # type: ignore[misc]
        found = saved_step(tmp_path)
        assert found in (expected, step)
        outcomes.append(found == step)
        expected = found
    assert outcomes == sorted(outcomes), "one moment from which on it is the new one"
    assert outcomes.count(False) > 15 and outcomes.count(True) > 3, "killed before and after it"
    assert [path.name for path in tmp_path.glob("data-*")] == [f"data-{step:012x}"], "nothing of the others is left"


def test_whoever_ends_last_commits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[Path] = []
    write_file, write_parts = manifest.write_file, checkpoint.write_parts
    both_have_written = threading.Barrier(2, timeout=60)

    def write_and_wait(file: Path, *args: Any) -> None:
        write_parts(file, *args)
        if file.name.startswith("rng"):  # the last of a share
            both_have_written.wait()

    monkeypatch.setattr(checkpoint, "write_parts", write_and_wait)
    monkeypatch.setattr(manifest, "write_file", lambda path, data: (commits.append(path), write_file(path, data)))
    for step in range(1, 6):
        threads = [threading.Thread(target=write) for write in shares(tmp_path, step)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert saved_step(tmp_path) == len(commits) == step


def test_a_share_that_is_missing_commits_nothing(tmp_path: Path) -> None:
    shares(tmp_path, 1)[1]()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.read(tmp_path)


def test_a_reader_meets_a_writer(tmp_path: Path) -> None:
    """What is being replaced is read as one checkpoint or as the next, and never as damaged."""
    for write in shares(tmp_path, 1):
        write()
    stop = threading.Event()

    def save_on() -> None:
        step = 1
        while not stop.is_set():
            step += 1
            for write in shares(tmp_path, step):
                write()

    thread = threading.Thread(target=save_on)
    thread.start()
    try:
        steps = [saved_step(tmp_path)]
        while steps[-1] < 10:
            steps.append(saved_step(tmp_path))
    finally:
        stop.set()
        thread.join()
    assert steps == sorted(steps)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_files(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    matrix = torch.randn(5, 3).bfloat16()
    rows = [(0, 2), (2, 5), (5, 5)]
    for rank, (start, stop) in enumerate(rows):
        save = Save(tmp_path, Stamp("0" * 12), rank=rank, size=3, groups=["weights"], state={})
        parts = {"matrix": TensorPart(matrix[start:stop].contiguous(), [start, 0], [5, 3])}
        if rank == 0:
            parts |= {"scalar": TensorPart(torch.tensor(2.5, dtype=torch.float64), [], [])}
        with save.held():
            save.write({"weights": parts})
    found = {"matrix": torch.zeros(5, 3, dtype=torch.bfloat16), "scalar": torch.zeros((), dtype=torch.float64)}
    load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / f"data-{0:012x}")), no_dist=True)
    assert torch.equal(found["matrix"], matrix) and float(found["scalar"]) == 2.5
    own = checkpoint.read(tmp_path).tensors["weights"]
    assert torch.equal(own["matrix"].read((slice(1, 4), slice(1, 3))), matrix[1:4, 1:3])
    assert own["matrix"].read((slice(5, 5), slice(0, 3))).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_the_library_reads_what_is_written_piece_by_piece(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {"a": torch.arange(7).to(dtype), "b": torch.ones(3, dtype=torch.float64), "c": torch.zeros(0, 2)}
    save = Save(tmp_path, Stamp("0" * 12), rank=0, size=1, groups=["g"], state={})
    with save.held():
        save.write({"g": parts_of(tensors)})
    found = load_file(next(tmp_path.glob("data-*/g-0.safetensors")))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape


# ----------------------------------------------------------------------------------------------------- snapshot


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(arena_module, "_arenas", {})


def test_a_snapshot_keeps_values_and_gives_memory_back_as_it_is_read(device: Any, small_blocks: None) -> None:
    where = device.torch_device
    tensors = [torch.randn(3000, device=where), torch.randn(5, device=where), torch.tensor(3.0), torch.zeros(0)]
    tensors.append(torch.randn(10, 100, device=where)[3:7])
    expected = [tensor.cpu().clone() for tensor in tensors]
    snapshot = Snapshot(device, tensors)
    arena = arena_of(device)
    free = [arena.free_bytes]
    for tensor, values in zip(tensors, expected, strict=True):
        tensor.fill_(-1)
        found = b"".join(piece.numpy().tobytes() for piece in snapshot.pieces(tensor))
        assert found == values.numpy().tobytes()
        free.append(arena.free_bytes)
    assert free == sorted(free) and free[1] > free[0]
    assert arena.free_bytes == arena.total_bytes > 0


def test_a_snapshot_that_nobody_reads_is_released(small_blocks: None) -> None:
    device = rlcore.get_device("cpu")
    tensors = [torch.randn(3000), torch.randn(3000)]
    snapshot = Snapshot(device, tensors)
    next(snapshot.pieces(tensors[0]))
    snapshot.release()
    assert arena_of(device).free_bytes == arena_of(device).total_bytes > 0


def test_a_copy_is_given_up_where_another_worker_has_no_room_for_its_own(
    small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed = iter([False, True])  # once rank 0 has made the folder, and once all have made their copies
    monkeypatch.setattr(Saver, "_any", lambda *_: next(has_failed))
    monkeypatch.setattr(Saver, "_cause", lambda *_: "rank 1: it has no room")
    device = rlcore.get_device("cpu")
    captured = Captured({"weights": {"w": torch.randn(3000)}}, {})
    with pytest.raises(CheckpointError, match="rank 1: it has no room; nothing of it is left"):
        Saver(device).save(tmp_path, captured, blocking=False)
    assert arena_of(device).free_bytes == arena_of(device).total_bytes > 0


# ------------------------------------------------------------------------------------------- in the background


@pytest.fixture(scope="module")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(adamw_policy(Qwen2ForCausalLM, lr=1e-2)):  # type: ignore[misc]
        def die_as_it_writes(self, go: Path) -> None:
            """The worker is killed with one of its files written, when ``go`` is there."""
            write_parts = checkpoint.write_parts

            def write_one(*args: Any) -> None:
                write_parts(*args)
                while not go.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

            checkpoint.write_parts = write_one

    return Policy


def make(policy: Any, folder: Path) -> rlcore.TrainEngine:
    with rlcore.meta_device():
        return rlcore.TrainEngine(policy.from_pretrained(folder))


def train(engine: rlcore.TrainEngine, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "input_ids": torch.randint(VOCAB, (4, 12), generator=generator),
        "old_logprobs": torch.full((4, 12), -3.0),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]),
    }
    return engine.train_batch(batch, ppo_clip())["loss"]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


class Gate:
    """Holds the background back before it writes, or makes it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.error: Exception | None = None
        write_parts = checkpoint.write_parts

        def wait(*args: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.opened.wait(60)
                if self.error is not None:
                    raise self.error
            write_parts(*args)

        monkeypatch.setattr(checkpoint, "write_parts", wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def test_training_goes_on_while_a_save_is_written(engine: rlcore.TrainEngine, gate: Gate, tmp_path: Path) -> None:
    train(engine, 0)
    saved = engine.state_dict()
    pending = engine.save(tmp_path, {"step": 1}, blocking=False)
    expected = [train(engine, seed) for seed in (1, 2)]
    assert not pending.done()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s; it goes on"):
        pending.result(timeout_s=0.1)
    assert not (tmp_path / "manifest.json").exists()
    engine.offload()  # the copy is not of the engine's
    engine.onload()
    gate.opened.set()
    assert pending.wait() > 0 and pending.done()
    assert pending.result() == pending.result()
    assert engine.load(tmp_path) == {"step": 1}
    assert same(engine.state_dict(), saved)
    assert [train(engine, seed) for seed in (1, 2)] == expected
    arena = arena_of(rlcore.get_device("cpu"))
    assert arena.free_bytes == arena.total_bytes, "the copy's memory is free again"


def test_what_was_saved_and_exported_can_be_offloaded(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    train(engine, 0)
    engine.save(tmp_path / "checkpoint")
    engine.save(tmp_path / "checkpoint", blocking=False)
    engine.export(tmp_path / "model")
    engine.offload()
    assert all(tag["device_bytes"] == 0 for tag in engine.memory_report()[0]["tags"].values())
    engine.onload()
    train(engine, 1)


def test_the_next_save_waits_for_the_one_before(engine: rlcore.TrainEngine, gate: Gate, tmp_path: Path) -> None:
    first = engine.save(tmp_path, {"step": 1}, blocking=False)
    threading.Timer(0.2, gate.opened.set).start()
    second = engine.save(tmp_path, {"step": 2}, blocking=False)
    assert first.done() and checkpoint.read(tmp_path).state["extra"]["step"] in (1, 2)
    second.result()
    assert engine.load(tmp_path) == {"step": 2}
    engine.save(tmp_path, {"step": 3}, blocking=False)
    assert engine.load(tmp_path) == {"step": 3}, "load waits too"


@pytest.mark.parametrize("touch", ["result", "save", "load", "close"])
def test_an_error_in_the_background_is_raised_once_by_what_touches_it(
    engine: rlcore.TrainEngine, gate: Gate, tmp_path: Path, touch: str
) -> None:
    engine.save(tmp_path, {"step": 1})
    gate.error = OSError("no space left, planted")
    gate.opened.set()
    pending = engine.save(tmp_path, {"step": 2}, blocking=False)
    touches: dict[str, Callable[[], Any]] = {
        "result": pending.result,
        "save": lambda: engine.save(tmp_path, {"step": 3}),
        "load": lambda: engine.load(tmp_path),
        "close": engine.close,
    }
    with pytest.raises(CheckpointError, match=r"cannot write .* no space left, planted; the previous .* is intact"):
        touches[touch]()
    assert checkpoint.read(tmp_path).state["extra"] == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 2, "what was written of it is gone"
    if touch == "close":
        assert not engine.is_built
    else:
        assert engine.load(tmp_path) == {"step": 1}, "raised once"
    with pytest.raises(CheckpointError, match="planted"):
        pending.result()  # the handle always tells


def test_the_copy_of_a_save_that_failed_is_freed_before_anybody_asks(
    engine: rlcore.TrainEngine, gate: Gate, tmp_path: Path
) -> None:
    gate.error = OSError("planted")
    gate.opened.set()
    pending = engine.save(tmp_path, blocking=False)
    while not pending.done():
        time.sleep(0.01)
    arena = arena_of(rlcore.get_device("cpu"))
    assert arena.free_bytes == arena.total_bytes > 0
    with pytest.raises(CheckpointError, match="planted"):
        pending.result()


def test_an_error_of_the_program_is_not_hidden_by_one_of_the_save(
    policy: Any, qwen2_folder: Path, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate.error = OSError("planted")
    gate.opened.set()
    with pytest.raises(KeyError, match="of the program"), make(policy, qwen2_folder) as engine:
        engine.build(devices="cpu")
        engine.save(tmp_path, blocking=False)
        raise KeyError("of the program")
    assert "cannot write the checkpoint" in caplog.text and "nothing of it is left" in caplog.text


def test_closing_and_restarting_wait_for_the_save(engine: rlcore.TrainEngine, gate: Gate, tmp_path: Path) -> None:
    train(engine, 0)
    saved = engine.state_dict()
    engine.save(tmp_path / "first", blocking=False)
    train(engine, 1)
    threading.Timer(0.2, gate.opened.set).start()
    engine.restart()
    assert same(engine.state_dict(), saved), "the save in the background was the last"
    gate.opened.clear()
    engine.save(tmp_path / "second", {"step": 2}, blocking=False)
    threading.Timer(0.2, gate.opened.set).start()
    engine.close()
    assert checkpoint.read(tmp_path / "second").state["extra"] == {"step": 2}


def test_a_copy_that_does_not_fit_is_refused_with_the_numbers(
    engine: rlcore.TrainEngine, small_blocks: None, tmp_path: Path
) -> None:
    arena_of(rlcore.get_device("cpu")).set_limit(50_000)
    train(engine, 0)
    with pytest.raises(
        CheckpointError,
        match=r"needs a copy of this worker's \d+ bytes: .* needs \d+ bytes of host memory more, and host_memory_bytes "
        r"is 50000 bytes, of which 0 are used; .*save\(blocking=True\) needs none; nothing of it is left",
    ):
        engine.save(tmp_path, blocking=False)
    assert list(tmp_path.iterdir()) == []
    engine.save(tmp_path, {"step": 1})
    train(engine, 1)
    assert engine.load(tmp_path) == {"step": 1}


@pytest.mark.slow
def test_a_worker_killed_as_it_writes_in_the_background(
    policy: Any, qwen2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "checkpoint"
    with make(policy, qwen2_folder) as engine:
        engine.build(devices="cpu:7", launcher="process", timeout_s=300)
        train(engine, 0)
        pending = engine.save(folder, {"step": 1}, blocking=False)
        saved, expected = engine.state_dict(), train(engine, 1)
        assert pending.result(timeout_s=300) > 0
        engine.die_as_it_writes(tmp_path / "go")
        pending = engine.save(folder, {"step": 2}, blocking=False)
        (tmp_path / "go").touch()
        while not pending.done():
            time.sleep(0.02)
        died = r"the worker of rank 0 \(cpu:7\) was killed by SIGKILL .*"
        with pytest.raises(StateError, match=rf"ended after an earlier failure \({died}\); call restart\(\)"):
            train(engine, 2)
        with pytest.raises(CheckpointError, match=rf"checkpoint was not written: {died}; the one before it") as raised:
            pending.result()
        assert isinstance(raised.value.__cause__, WorkerDiedError) and raised.value.__cause__.rank == 0
        engine.restart()
        assert same(engine.state_dict(), saved)
        assert train(engine, 1) == expected
        assert engine.save(folder, {"step": 3}, blocking=False).result() > 0
        assert engine.load(folder) == {"step": 3}
        engine.die_as_it_writes(tmp_path / "never")
        engine.save(folder, {"step": 4}, blocking=False)
        os.kill(engine.executors[0].workers[0].process_id, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(
            CheckpointError, match=r"was not written: .* on rank 0 \(cpu:7\), which is stopped .SIGSTOP"
        ):
            engine.close()
        assert time.monotonic() - started < 60, "timeout_s is 300"
    assert checkpoint.read(folder).state["extra"] == {"step": 3}


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
def test_an_end_of_the_workers_is_named_by_the_save_whoever_found_it(
    tmp_path: Path, asks: bool, is_known: bool
) -> None:
    """``is_known``: a call of another kind was told, so that later ones are refused."""
    died = WorkerDiedError(rank=1, device="cpu:1", method="end_save", how="was killed by SIGKILL")
    errors: list[Exception] = [died]

    def call(*_: object) -> Any:
        error, errors[0] = errors[0], StateError("refused")
        errors[0].__cause__ = died
        raise error

    if is_known:
        with contextlib.suppress(WorkerDiedError):
            call()
    pending = PendingSave(tmp_path, "data-000000000001", call, call)
    assert not asks or pending.done()
    text = rf"the checkpoint {tmp_path} was not written: {re.escape(str(died))}; there is none before it"
    with pytest.raises(CheckpointError, match=text) as raised:
        pending.result()
    assert raised.value.__cause__ is died


@pytest.mark.parametrize("asks", [True, False])
def test_a_save_that_was_complete_when_the_workers_ended_has_succeeded(tmp_path: Path, asks: bool) -> None:
    """Its seconds are known to nobody any more."""
    for write in shares(tmp_path, 1):
        write()

    def call(*_: object) -> Any:
        raise WorkerDiedError(rank=1, device="cpu:1", method="end_save", how="was killed by SIGKILL")

    pending = PendingSave(tmp_path, f"data-{1:012x}", call, call)
    assert not asks or pending.done()
    assert math.isnan(pending.result())
    assert pending.has_succeeded and pending.done() and pending.unseen_error is None


@pytest.mark.slow
def test_a_killed_program_leaves_the_last_complete_checkpoint(qwen2_folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import itertools, rlcore, rlcore.nn, torch
        from transformers import Qwen2ForCausalLM

        class Policy(rlcore.nn.HuggingFaceTrainModule, Qwen2ForCausalLM):
            def on_weights_materialized(self):
                self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            def set_to(self, value):
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.fill_(value)

        with rlcore.meta_device():
            module = Policy.from_pretrained({str(qwen2_folder)!r})
        engine = rlcore.TrainEngine(module).build(devices=["cpu:0", "cpu:1"], data_parallel_size=2)
        for step in itertools.count(1):
            engine.set_to(float(step))
            engine.save({str(tmp_path / "checkpoint")!r}, {{"step": step}}, blocking=False)
            print(step, flush=True)
        """)
    )
    for wanted in (2, 6):
        with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == wanted:
                    break
            process.send_signal(signal.SIGKILL)
        found = checkpoint.read(tmp_path / "checkpoint")
        step = found.state["extra"]["step"]
        assert step >= wanted - 1
        for tensor in found.tensors["weights"].values():
            assert set(tensor.read().flatten().tolist()) == {float(step)}


def test_plain_values_are_checked_before_anything_is_copied(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"save\(\) cannot keep extra\['step'\] = <object object"):
        engine.save(tmp_path, {"step": object()}, blocking=False)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_named_and_left_alone(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("kept")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*notes.txt: .*Not a directory"):
        engine.save(path)
    with pytest.raises(CheckpointError, match=r"notes.txt is damaged: .*Not a directory"):
        engine.load(path)
    assert path.read_text() == "kept"
