"""Sender and receiver without engines: two processes, or threads, that share nothing but a socket."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from channel import SocketControl
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from unrelated_receiver import receive

import rlcore
from rlcore.engines.weight_sync.channels import shared_store
from rlcore.engines.weight_sync.channels.connections import accept_controls, connect_control
from rlcore.engines.weight_sync.target import ModuleTarget
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import InvalidInputError, SyncError
from rlcore.registry import get_device
from rlcore.settings import Settings
from tests.warm import TorchPopen

SHAPES = {"0.weight": (30, 40), "0.bias": (30,), "1.weight": (3, 30)}


class Other:
    """The receiving process."""

    def __init__(self, path: Path, *arguments: str, **environment: str) -> None:
        script = Path(__file__).with_name("unrelated_receiver.py")
        self.process = TorchPopen(
            [sys.executable, str(script), str(path), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


class Beside:
    """The same in a thread of this process."""

    def __init__(self, path: Path) -> None:
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=receive, args=(str(path), self._said.put))
        self.thread.start()

    def says(self) -> dict[str, Any]:
        return self._said.get(timeout=100)


@pytest.fixture
def other(short_folder: Path) -> Iterator[Other]:
    other = Other(short_folder / "control")
    with other.process:
        yield other
        other.process.kill()


class Recorded(SocketControl):
    """Keeps how long each answer may take."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waits_s: list[float] = []

    def recv(self, timeout_s: float) -> bytes:
        self.waits_s.append(timeout_s)
        return super().recv(timeout_s)


@pytest.fixture
def control(other: Other, short_folder: Path) -> Iterator[Recorded]:
    control = Recorded.listen(short_folder / "control")
    yield control
    control.close()


@pytest.fixture
def beside(short_folder: Path) -> Iterator[tuple[Beside, SocketControl]]:
    beside = Beside(short_folder / "control")
    control = SocketControl.listen(short_folder / "control")
    yield beside, control
    control.close()
    beside.thread.join()


def tensors(value: float) -> dict[str, Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def sums(value: float) -> list[float]:
    return [value * torch.Size(shape).numel() for shape in SHAPES.values()]


def test_two_unrelated_processes(other: Other, control: SocketControl) -> None:
    given, stores = tensors(1.0), dict(shared_store._here)
    sender = rlcore.WeightSender(given.items(), control)
    report = sender.send(version=7)
    assert (report.version, report.route, report.handles_opened) == (7, "packed", 1)
    assert other.says() == {"version": 7, "sums": sums(1.0), "is_whole": True}
    for tensor in given.values():
        tensor.fill_(2.0)
    report = sender.send(verify=True)
    assert (report.version, report.handles_opened) == (8, 0)
    assert other.says() == {"version": 8, "sums": sums(2.0), "is_whole": True}
    sender.send(staged=True)
    assert other.says()["version"] == 9
    given["0.bias"].fill_(0.5)
    runtime = Settings.from_env().runtime
    before = set(runtime.iterdir())
    sender.send(route="collective")
    assert other.says()["sums"] == [sums(2.0)[0], 15.0, sums(2.0)[2]]
    assert set(runtime.iterdir()) <= before, "they met through the channel"
    assert len(shared_store._here) == len(stores) + 1
    for kind, value in ((MemoryError, 3.0), (KeyboardInterrupt, 4.0)):
        sender._sender._fill = mock.Mock(side_effect=kind("in the middle"))
        given["1.weight"].fill_(value)
        with pytest.raises(kind, match="in the middle"):
            sender.send(route="collective", timeout_s=3600)  # whoever waits for this deadline does not pass
        told = other.says()
        assert "the sender gave the round up: in the middle. The model's weights are whole" in told["error"]
        del sender._sender._fill
        sender.send(route="collective")
        assert other.says()["sums"] == [sums(2.0)[0], 15.0, sums(value)[2]]
    sender.close()
    assert shared_store._here == stores
    control.close()
    assert other.says()["is_whole"]


@pytest.mark.parametrize(
    ("own", "others", "visible"),
    [
        pytest.param("cuda:0", "cuda:1", "1,0", marks=pytest.mark.multigpu, id="the same GPU by another number"),
        pytest.param("cuda:0", "cuda:0", "1,0", marks=pytest.mark.multigpu, id="another GPU by the same number"),
    ],
)
@pytest.mark.parametrize("route", ["direct", "packed"])
def test_devices_are_known_by_what_they_are(
    own: str, others: str, visible: str, route: Any, short_folder: Path
) -> None:
    """The two processes number them differently."""
    other = Other(short_folder / "control", others, CUDA_VISIBLE_DEVICES=visible)
    with other.process:
        control = SocketControl.listen(short_folder / "control")
        given = {name: tensor.to(own) for name, tensor in tensors(1.0).items()}
        sender = rlcore.WeightSender(given, control)
        for value in (1.0, 2.0):
            for tensor in given.values():
                tensor.fill_(value)
            assert sender.send(route=route).route == route
            assert other.says()["sums"] == sums(value)
        sender.close()
        control.close()
        other.process.kill()


def test_a_function_gives_new_tensors_for_each_send(beside: tuple[Beside, SocketControl]) -> None:
    other, control = beside
    now = tensors(1.0)
    sender = rlcore.WeightSender(lambda: now, control)
    sender.send()
    assert other.says()["sums"] == sums(1.0)
    now = tensors(3.0)
    sender.send()
    assert other.says()["sums"] == sums(3.0)
    now = tensors(3.0) | {"0.bias": torch.zeros(31)}
    with pytest.raises(SyncError, match=r"not those that this sender was first given: of other shapes: 0.bias \[31\]"):
        sender.send()
    sender.close()


@pytest.mark.slow
def test_after_revoke_the_memory_of_what_a_function_gave_is_free(other: Other, control: SocketControl) -> None:
    now = tensors(0.0)
    sender = rlcore.WeightSender(lambda: now, control)
    for value, route in ((1.0, "direct"), (2.0, "packed"), (3.0, "direct")):
        now = tensors(value)
        assert sender.send(route=route).route == route
        assert other.says()["sums"] == sums(value)
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in now.values()]
        now = {}
        assert not any(storage.expired() for storage in storages)
        sender.revoke()
        assert all(storage.expired() for storage in storages)
    sender.close()


def test_tensors_that_got_other_memory_are_sent_from_there(other: Other, control: SocketControl) -> None:
    """By "direct" the receiver copied the old memory for ever, as versions that were called new."""
    given = tensors(0.0)
    sender = rlcore.WeightSender(given, control)
    opened = []
    routes: list[Route] = ["direct"] * 4 + ["packed"] * 2 + ["collective"] * 2
    for version, route in enumerate(routes):
        for tensor in given.values():
            if version % 2:
                tensor.data = torch.full_like(tensor, version)
            else:
                tensor.fill_(version)
        opened.append(sender.send(version, route=route).handles_opened)
        assert other.says() == {"version": version, "sums": sums(version), "is_whole": True}
    assert opened == [3, 3, 0, 3, 1, 0, 0, 0]


def test_names_that_differ_are_refused_on_both_sides(beside: tuple[Beside, SocketControl]) -> None:
    other, control = beside
    sender = rlcore.WeightSender({"weight": torch.ones(3)}, control)
    with pytest.raises(SyncError, match="unexpected: weight"):
        sender.send()
    found = other.says()
    assert "the sender gave the round up: prepare() failed at the receiver: SyncError: " in found["error"]
    assert found["error"].endswith("unexpected: weight. The model's weights are whole")
    with pytest.raises(InvalidInputError, match="at least one named tensor"):
        rlcore.WeightSender({}, control)


@pytest.mark.slow
def test_a_receiver_that_ends_or_stops_is_named_in_time(other: Other, control: Recorded) -> None:
    sender = rlcore.WeightSender(tensors(1.0), control)
    sender.send()
    assert other.says()["version"] == 1
    os.kill(other.process.pid, signal.SIGSTOP)
    control.waits_s.clear()
    with pytest.raises(SyncError, match=r"^the receiver did not answer begin\(\): the 2 s of this round are over$"):
        sender.send(timeout_s=2.0)
    begin_s, told_s = control.waits_s
    assert 0 < begin_s <= 2 and told_s == 0, "nobody waits for what it would say to that"
    os.kill(other.process.pid, signal.SIGCONT)
    told = "the sender gave the round up: the receiver did not answer begin(): the 2 s of this round are over."
    assert told in other.says()["error"]
    assert sender.send(version=5, timeout_s=60.0).version == 5
    assert other.says() == {"version": 5, "sums": sums(1.0), "is_whole": True}
    other.process.kill()
    other.process.wait()
    with pytest.raises(SyncError, match=r"the receiver is gone; begin\(\) found"):
        sender.send(timeout_s=60.0)
    sender.close()


@pytest.mark.slow
@pytest.mark.parametrize(("bucket", "is_whole"), [(1, True), (3, False)])
def test_a_sender_that_ends_midway(short_folder: Path, bucket: int, is_whole: bool) -> None:
    """Here the receiver is this process, and the sender one that kills itself before a bucket."""
    code = """
import os, signal, sys, torch, rlcore
from channel import SocketControl
from pathlib import Path
from rlcore.engines.weight_sync.sender import Sender
sender = rlcore.WeightSender({"weight": torch.ones(300, 300)}, SocketControl.listen(Path(sys.argv[1])))
assert sender.send(staging_bytes=1 << 16).version == 1
calls = []
def pack(self, order, real=Sender.pack):
    calls.append(order)
    return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == int(sys.argv[2]) else real(self, order)
Sender.pack = pack
sender.send(staging_bytes=1 << 16)
"""
    path = short_folder / "control"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code, str(path), str(bucket)], env=environment) as process:
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.01)
        model = torch.nn.Linear(300, 300, bias=False)
        control = SocketControl.connect(path)
        receiver = rlcore.WeightReceiver(model, control)
        assert receiver.receive(timeout_s=100) == 1
        state = "are whole" if is_whole else "are a mixture: do not use them"
        with pytest.raises(SyncError, match=rf"the sender is gone: .* The model's weights {state}"):
            receiver.receive(timeout_s=100)
        assert receiver.is_whole == is_whole
        receiver.close()
        control.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", [AssertionError, OSError, AttributeError], ids=lambda kind: kind.__name__)
def test_whatever_the_receivers_loader_raises_is_told_at_once(kind: type[Exception], short_folder: Path) -> None:
    class Loader(ModuleTarget):
        def reload(self, weights: Any) -> None:
            raise kind("the loader says no")

    def receive() -> str:
        control = connect_control(short_folder / "control")
        receiver = rlcore.WeightReceiver(Loader(torch.nn.Linear(2, 2), get_device("cpu")), control)
        with pytest.raises(SyncError) as caught:
            receiver.receive(timeout_s=3600)
        control.close()
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        controls = accept_controls(short_folder / "control", 1)
        sender = rlcore.WeightSender(torch.nn.Linear(2, 2).named_parameters, controls)
        with pytest.raises(SyncError) as caught:
            sender.send(timeout_s=3600, verify=True)  # whoever waits for this deadline does not pass
        refusal = f"load() failed at receiver 0: {kind.__name__}: the loader says no"
        assert str(caught.value) == refusal
        assert f"the sender gave the round up: {refusal}. The model's weights are a mixture" in received.result()
    sender.close()
    controls[0].close()


def test_messages_that_are_none_are_refused() -> None:
    class Says:
        def send(self, data: bytes) -> None:
            pass

        def recv(self, timeout_s: float) -> bytes:
            return b"\x00junk"

    receiver = rlcore.WeightReceiver(torch.nn.Linear(2, 2), Says())
    with pytest.raises(SyncError, match="these 5 bytes are no request"):
        receiver.receive()
    with pytest.raises(SyncError, match="these 5 bytes are no answer"):
        rlcore.WeightSender({"weight": torch.ones(2)}, Says()).send()
