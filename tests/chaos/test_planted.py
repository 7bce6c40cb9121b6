"""Defects that rlcore had once are put back, and ``rlcore chaos`` must find each of them.

The numbers are those of the list in which they were reported.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import msgspec
import pytest

from rlcore import atomic
from rlcore.chaos import faults, process_faults, program
from rlcore.chaos.channel import run_rounds
from rlcore.chaos.checks import ViolationError
from rlcore.chaos.engines import Engines
from rlcore.chaos.plan import EngineLayout, Incident
from rlcore.conformance.tiny_model import write_tiny_model
from rlcore.engines.checkpointing import CheckpointedEngine
from rlcore.engines.checkpoints import checkpoint
from rlcore.engines.checkpoints.pending_save import PendingSave
from rlcore.engines.checkpoints.tensor_file import TensorFile
from rlcore.engines.engine import Engine
from rlcore.engines.fsdp2.executor import Fsdp2Executor
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.launchers import failures, group, worker_process
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.weight_sync import api
from rlcore.engines.weight_sync.channels import control
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.errors import StateError
from rlcore.process import runtime_folder
from tests.warm import warm_workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _warm_workers() -> Iterator[None]:
    with warm_workers():
        yield


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("round")
    for name in ("runtime", "tmp"):
        (folder / name).mkdir(mode=0o700)
    write_tiny_model(folder / "model")
    yield folder


@pytest.fixture(scope="module")
def kept() -> Iterator[list[Engines]]:
    """The engines of the last test, which the next one takes over."""
    found: list[Engines] = []
    yield found
    for engines in found:
        engines.close()


@pytest.fixture
def engines(scratch: Path, kept: list[Engines], monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setenv("RLCORE_RUNTIME", str(scratch / "runtime"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if not kept:
        layout = EngineLayout(device="cpu", trainers=["cpu:0", "cpu:1"], sampler="cpu:2", executor="hf")
        kept.append(Engines(layout, scratch))
    (found,) = kept
    found.build()
    found.recover()
    return found


def in_workers(engines: Engines, plant: Callable[[Any], None]) -> None:
    engines.train.call("run", plant)


# --------------------------------------------------------------------------------------- the defects, put back


def damage_is_not_looked_for(module: Any) -> None:
    TensorFile.check_data = lambda self: None  # type: ignore[method-assign]


def load_changes_before_it_checks(module: Any) -> None:
    real = Fsdp2Executor.load

    def load(self: Any, folder: Path) -> Any:
        module.lm_head.weight.data.zero_()
        return real(self, folder)

    Fsdp2Executor.load = load  # type: ignore[method-assign]


def the_first_rank_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "state_of_worker", lambda stack: (0, "is somewhere"))
    monkeypatch.setattr(group, "STOPPED", "", raising=False)


def a_mixture_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InferenceEngine, "_poison", lambda self: None)


def close_waits_for_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the deadline of the stopped worker, twice what close() may take: less of both shows the same sooner."""
    monkeypatch.setattr(process_faults, "CLOSE_S", 10.0)
    monkeypatch.setitem(faults._LONGEST_S, "close", 10.0)

    def close(self: CheckpointedEngine) -> None:
        try:
            self._settle_save()
        finally:
            Engine.close(self)

    monkeypatch.setattr(CheckpointedEngine, "close", close)


def a_death_is_an_earlier_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def workers_ended(self: PendingSave, error: Exception) -> None:
        raise StateError("end_save() is refused: the workers were ended after an earlier failure") from error

    monkeypatch.setattr(PendingSave, "_workers_ended", workers_ended)


def listeners_take_strangers(module: Any) -> None:
    """As before there was a filter."""
    detach_filter = 27
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as listener:
            listener.setsockopt(socket.SOL_SOCKET, detach_filter, 0)


def limits_are_not_raised(module: Any) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))


def manifests_of_killed_saves_stay(module: Any) -> None:
    checkpoint.remove_unfinished_manifests = lambda folder: None  # type: ignore[assignment]
    atomic.remove_unfinished = lambda path: None  # type: ignore[assignment]
    real = checkpoint.write_manifest

    def write(folder: Path, text: bytes) -> None:
        (folder / ".manifest.json.rlcore-x1_abcde").write_bytes(text)  # a save that was killed before this one
        real(folder, text)

    checkpoint.write_manifest = write  # type: ignore[assignment]


def allocations_fail_without_facts(module: Any) -> None:
    failures.want_of_memory = lambda *_: ""  # type: ignore[assignment]


def stores_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup, "_remove_store", lambda self: self._abandoned.detach())


def any_runtime_folder_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_folder, "_why_not_trusted", lambda *_: "", raising=False)


def links_of_others_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_folder, "_FOLDER", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def every_end_is_a_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "was killed by SIGKILL (sent by somebody, or by the kernel for want of memory)"
    monkeypatch.setattr(worker_process, "how_it_ended", lambda *_: told)


def commits_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: Any, round_id: int, version: int, *_: Any) -> None:
        self._target.committed(version)
        self.version = version
        if hasattr(self, "_round"):
            self._round.commit(has_moved=True)
        else:
            self.is_whole = True
        self._drop_round()

    monkeypatch.setattr(Receiver, "commit", commit)


def messages_are_decoded_to_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (api, control):
        monkeypatch.setattr(module, "decoded", lambda data, kind, what: msgspec.msgpack.decode(data, type=kind))


class Planted(NamedTuple):
    item: int
    defect: Callable[[Any], None]
    step: str
    fault: str
    seed: str
    told: str
    """Words that the driver says of it."""
    is_in_workers: bool = False
    most_tries: int = 1
    """More where it is a race what the fault meets, such as which rank's part was written before another was killed."""


PLANTED = [
    Planted(1, damage_is_not_looked_for, "load", "zeroed_data", "0", "damage was not found|as if nothing had", True),
    Planted(2, load_changes_before_it_checks, "load", "lost_file", "0", "has changed weights or optimizer", True),
    Planted(3, the_first_rank_is_blamed, "train", "stop", "4", "blames another"),
    Planted(
        4, listeners_take_strangers, "train", "connections", "0", "no error was promised, and Worker(Died|Error)", True
    ),
    Planted(4, limits_are_not_raised, "train", "connections", "0", "may have 1024 descriptors, and could have", True),
    Planted(5, a_mixture_is_served, "sync", "kill", "220", "neither its old weights nor the new ones", most_tries=12),
    Planted(6, a_death_is_an_earlier_failure, "save_in_background", "kill", "0", "the error (blames another|does not)"),
    Planted(6, close_waits_for_a_save, "close", "stop", "1", "close took"),
    Planted(8, stores_stay, "close", "none", "0", r"after close\(\) there are still: .*store-"),
    Planted(
        8, manifests_of_killed_saves_stay, "save", "none", "0", r"files of no checkpoint: \.manifest\.json\.", True
    ),
    Planted(9, any_runtime_folder_is_trusted, "build", "open_folder", "0", "went on as if nothing had happened"),
    Planted(9, links_of_others_are_followed, "build", "foreign_link", "0", "went on as if nothing had happened"),
    Planted(10, every_end_is_a_strangers, "call", "closed_descriptors", "0", "which is not so"),
    Planted(10, allocations_fail_without_facts, "call", "no_memory", "0", "the error does not say .*Held by", True),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.item}-{planted.defect.__name__}")
def test_a_defect_is_found_when_it_is_put_back(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, planted: Planted
) -> None:
    with monkeypatch.context() as patch:
        if planted.is_in_workers:
            in_workers(engines, planted.defect)
        else:
            planted.defect(patch)
        for _ in range(planted.most_tries):
            found = program.run(engines, Incident(planted.step, planted.fault, planted.seed))
            if re.search(planted.told, found["violation"]):
                break
    if planted.is_in_workers:
        engines.close()
    assert re.search(planted.told, found["violation"]), f"{found}"


SOCKETS_STAY = """
from rlcore.process.runtime_folder import RuntimeFolder
remove = RuntimeFolder.remove
RuntimeFolder.remove = lambda self, name: None if name.startswith("ipc-") else remove(self, name)
"""
ANY_RECORD_IS_BELIEVED = """
import sys
if "ps" in sys.orig_argv:
    from rlcore.engines.launchers import running
    running._is_own_worker = lambda process: True
"""
RECORDS_ARE_PRINTED_AS_THEY_ARE = """
import sys
if "ps" in sys.orig_argv and "--kill" not in sys.orig_argv:
    from rlcore.cli import console
    from rlcore.engines.launchers import running
    running._is_own_worker = lambda process: True
    console.printable = lambda text: text
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("code", "met", "told"),
    [
        (SOCKETS_STAY, ("close", "none"), r"after close\(\) there are still: .*ipc-\d+-\d+\.sock"),
        (
            ANY_RECORD_IS_BELIEVED,
            ("list_processes", "planted_record"),
            "ended a process that is no worker",
        ),
        (RECORDS_ARE_PRINTED_AS_THEY_ARE, ("list_processes", "planted_record"), "prints escapes"),
    ],
    ids=["8-sockets_stay", "9-any_record_is_believed", "9-records_are_printed_as_they_are"],
)
def test_a_defect_of_every_process_is_found(
    engines: Engines, tmp_path: Path, code: str, met: tuple[str, str], told: str
) -> None:
    """The guards of workers, or ``rlcore ps``, have the defect, too: Python runs ``sitecustomize`` at every start."""
    (tmp_path / "sitecustomize.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        if code == SOCKETS_STAY:
            engines.close()
            patch.setattr(worker_process, "subprocess", subprocess)  # which does not begin warm
            engines.build()
            engines.check_whole()  # its sync opens sockets
        found = program.run(engines, Incident(*met, "0"))
        engines.close()
    for left in (engines.scratch / "runtime").iterdir():  # by this defect, and by those before it
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert re.search(told, found["violation"]), f"{found}"


@pytest.mark.parametrize(
    ("defect", "kind", "told"),
    [
        (commits_are_not_checked, "early_commit", "says that it is whole, and holds values of the versions"),
        (messages_are_decoded_to_any_depth, "nested_message", r"receive\(\) raised (RecursionError|ValidationError)"),
    ],
    ids=["5-commits_are_not_checked", "7-messages_are_decoded_to_any_depth"],
)
def test_a_defect_of_the_channel_is_found(
    monkeypatch: pytest.MonkeyPatch, defect: Callable[[Any], None], kind: str, told: str
) -> None:
    defect(monkeypatch)
    with pytest.raises(ViolationError, match=told):
        run_rounds(kind, random.Random(0))
