"""A process that is stopped, or reads nothing, holds up nobody but itself."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.devices.ipc.channel import IpcChannel
from rlcore.devices.ipc.messages import Release
from rlcore.errors import DeviceError, StateError
from rlcore.types import IpcHandle

from .conftest import MakePeer, Peer, wait_until

pytestmark = pytest.mark.usefixtures("runtime_folder")

SERVED_WITHIN_S = 20.0  # a stopped process stays so until the test ends; an import takes a millisecond

FLOOD = """
import socket
from rlcore.devices.ipc.messages import Claim, encode
asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asking.connect(handle_of(text).exporter)
asking.setblocking(False)
h, result = handle_of(text), 0
while result < 400:
    try:
        asking.send(encode(Claim(result + 1, export_id or h.export_id, h.device_uuid, h.payload, h.storage_bytes)))
        result += 1
    except BlockingIOError:
        pass
"""
EXPORT = """
tensor = torch.arange(4.0, device=device.torch_device)
device.synchronize()
handle = device.memory.export_ipc(tensor)
result = handle.to_bytes().hex()
"""


def exported(device: Any) -> tuple[IpcHandle, str]:
    tensor = torch.arange(4.0, device=device.torch_device)
    device.synchronize()
    handle = device.memory.export_ipc(tensor)
    return handle, handle.to_bytes().hex()


def import_from(device: Any, text: str) -> float:
    """Seconds."""
    began = time.monotonic()
    with device.memory.import_ipc(IpcHandle.from_bytes(bytes.fromhex(text))) as mapping:
        assert mapping.tensor.tolist() == [0, 1, 2, 3]
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("asks_for", ["what there is", "nothing known"])
def test_an_importer_that_reads_no_answers_and_is_stopped(
    device: Any, peer: Peer, make_peer: MakePeer, asks_for: str
) -> None:
    handle, text = exported(device)
    flooding = make_peer()
    flooding.run(FLOOD, text=text, export_id="" if asks_for == "what there is" else "0")
    flooding.stop()
    peer.run("pass")  # it has imported torch
    began = time.monotonic()
    assert peer.run("with device.memory.import_ipc(handle_of(text)) as m: result = m.tensor.tolist()", text=text) == [
        0,
        1,
        2,
        3,
    ]
    assert device.memory.ledger()
    other, _ = exported(device)
    device.memory.revoke(other)
    assert time.monotonic() - began < SERVED_WITHIN_S
    flooding.kill()
    device.memory.revoke(handle)


@pytest.mark.slow
def test_a_stopped_importer_hears_of_every_revocation_when_it_goes_on(device: Any, make_peer: MakePeer) -> None:
    """More of them than its socket takes."""
    peer = make_peer()
    tensors = [torch.zeros(1, device=device.torch_device) for _ in range(150)]
    device.synchronize()
    handles = [device.memory.export_ipc(tensor) for tensor in tensors]
    peer.run(
        "told = []\nmappings = [device.memory.import_ipc(handle_of(text), told.append) for text in texts]",
        texts=[handle.to_bytes().hex() for handle in handles],
    )
    with small_buffers():
        peer.stop()
        began = time.monotonic()
        for handle in handles * 2:  # asked again, it is told once
            with pytest.raises(StateError, match=rf"still open in process {peer.pid}"):
                device.memory.revoke(handle, timeout_s=0)
        assert time.monotonic() - began < SERVED_WITHIN_S
    os.kill(peer.pid, signal.SIGCONT)
    wait_until(lambda: peer.run("result = [len(told), len({m.handle.export_id for m in told})]") == [150, 150])
    peer.run("for mapping in mappings: mapping.close()")
    for handle in handles:
        device.memory.revoke(handle)


def small_buffers() -> ExitStack:
    """Sockets of this process that are open take a few messages only."""
    from rlcore.devices.ipc.exporter import exporter

    kept = ExitStack()
    for importer in exporter()._importers:
        connection = importer.channel._connection
        kept.callback(connection.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return kept


@pytest.fixture
def full_exporter(device: Any, make_peer: MakePeer) -> Iterator[tuple[Peer, str]]:
    """A stopped process at whose socket so many wait already that the next has to wait to connect; a handle of it."""
    peer = make_peer()
    text = peer.run(EXPORT)
    peer.stop()
    waiting = []
    while True:
        waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        waiting[-1].setblocking(False)
        try:
            waiting[-1].connect(IpcHandle.from_bytes(bytes.fromhex(text)).exporter)
        except BlockingIOError:
            break
    yield peer, text
    for connection in waiting:
        connection.close()


@pytest.mark.slow
def test_an_exporter_that_cannot_be_reached_holds_up_imports_from_no_other(
    device: Any, peer: Peer, full_exporter: tuple[Peer, str]
) -> None:
    (full, text), failures = full_exporter, []
    peer.run("pass")  # it has imported torch
    handle = IpcHandle.from_bytes(bytes.fromhex(text))

    def import_in_vain() -> None:
        try:
            device.memory.import_ipc(handle, timeout_s=250)
        except DeviceError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=import_in_vain) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # they have most likely begun
    assert import_from(device, peer.run(EXPORT)) < SERVED_WITHIN_S
    assert not failures
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"did not answer within 0.3 s$"):  # its own deadline, not the others'
        device.memory.import_ipc(handle, timeout_s=0.3)
    with pytest.raises(DeviceError, match=r"did not answer within 0 s$"):
        device.memory.import_ipc(handle, timeout_s=0)
    assert time.monotonic() - began < SERVED_WITHIN_S
    full.kill()
    for thread in threads:
        thread.join()
    assert failures == [f"process {full.pid}, the exporter, has ended, or refuses this process's user"] * 2
    peer.run("device.memory.revoke(handle)")


def test_what_was_never_read_keeps_no_descriptor_open(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, path = IpcChannel(ours), tmp_path / "shared"

    def num_open() -> int:
        """Descriptors of this file: others of the process come and go."""
        return sum(_is_of(descriptor, path) for descriptor in os.listdir("/proc/self/fd"))

    with theirs, path.open("wb") as shared:
        for _ in range(1000):
            channel.send(Release("0"), shared.fileno())
        assert num_open() == channel.num_descriptors_waiting + 1 > 1
        theirs.close()
        wait_until(lambda: channel.num_descriptors_waiting == 0)  # its thread has seen the end
        with pytest.raises(OSError, match="Broken pipe"):
            channel.send(Release("0"))
        channel.close()
        assert channel.fileno() == -1
        wait_until(lambda: num_open() == 1)


def _is_of(descriptor: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except FileNotFoundError:
        return False
