"""Control channels over a Unix socket, and one sender with several receivers."""

from __future__ import annotations

import contextlib
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import rlcore
from rlcore.engines.weight_sync.channels.connections import accept_controls, connect_control
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.errors import InvalidInputError, SyncError
from tests.engines.weight_sync.channel import drain, fill


def test_messages_arrive_whole_and_in_order(ends: tuple[ControlSocket, ControlSocket]) -> None:
    here, there = ends
    long = bytes(range(256)) * 20_000  # more than a socket holds
    sending = threading.Thread(target=lambda: [here.send(data) for data in (b"", b"one", long)])
    sending.start()
    assert [there.recv(60) for _ in range(3)] == [b"", b"one", long]
    sending.join()
    with pytest.raises(TimeoutError):
        there.recv(0.01)
    there.close()
    with pytest.raises(ConnectionError, match="the other end has closed"):
        here.recv(60)
    here.close()


def test_what_is_no_control_channel_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    theirs.send(struct.pack("<Q", 1 << 62))
    with ours, theirs, pytest.raises(ConnectionError, match="the other end is no control channel"):
        ControlSocket(ours).recv(60)


def test_what_has_come_of_a_message_is_kept_for_the_next_call() -> None:
    ours, theirs = socket.socketpair()
    message = bytes(range(200))
    wire = struct.pack("<Q", len(message)) + message
    with ours, theirs:
        control = ControlSocket(ours)
        for part in (wire[:3], wire[3:8], wire[8:50]):
            theirs.sendall(part)
            with pytest.raises(TimeoutError):
                control.recv(0.01)
        theirs.sendall(wire[50:] + wire)
        assert [control.recv(60), control.recv(60)] == [message, message]


def test_a_message_that_is_not_taken_in_time_ends_the_connection_where_a_part_of_it_went() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        control = ControlSocket(ours)
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            control.send(bytes(1 << 24), 0.2)
        assert time.monotonic() - started < 60, "its own deadline; nobody ever reads"
        with pytest.raises(ConnectionError, match="this end has closed, perhaps since a message was not taken whole"):
            control.send(b"next")
        with pytest.raises(ConnectionError, match="the other end has closed"):
            ControlSocket(theirs).recv(60)


def test_a_message_of_which_nothing_went_may_be_sent_again() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fill(ours)
        control = ControlSocket(ours)
        with pytest.raises(TimeoutError):
            control.send(b"late", 0.01)
        drain(theirs)
        control.send(b"again", 60)
        assert ControlSocket(theirs).recv(60) == b"again"


def test_only_this_user_can_connect_and_the_socket_goes_away(short_folder: Path) -> None:
    path = short_folder / "s"
    modes = []

    def connect() -> ControlSocket:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        found = connect_control(path)
        modes.append(stat.S_IMODE(path.stat().st_mode))
        return found

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(connect)
        with pytest.raises(SyncError, match=r"1 of 2 receivers have connected to .* within 4 s"):
            accept_controls(path, 2, timeout_s=4.0)
        with contextlib.closing(other.result()) as connected, pytest.raises(ConnectionError):
            connected.recv(60)
    assert modes == [0o600]
    assert not path.exists()
    with pytest.raises(SyncError, match=r"no weight sender listens at .* after 0\.1 s"):
        connect_control(path, timeout_s=0.1)


def test_a_place_that_is_taken_or_left_behind(short_folder: Path) -> None:
    path = short_folder / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(InvalidInputError, match=r"cannot listen at .*: .*Address already in use"):
            accept_controls(path, 1, timeout_s=0.1)
    with pytest.raises(SyncError, match="0 of 1 receivers"):  # its program has ended
        accept_controls(path, 1, timeout_s=0.1)
    with pytest.raises(InvalidInputError, match=r"cannot listen at .*: AF_UNIX path too long"):
        accept_controls(short_folder / ("x" * 120), 1)
    (short_folder / "file").write_text("of somebody")
    with pytest.raises(InvalidInputError, match="cannot listen at"):
        accept_controls(short_folder / "file", 1, timeout_s=0.1)
    assert (short_folder / "file").read_text() == "of somebody"


def test_a_sender_has_several_receivers_who_commit_together(short_folder: Path) -> None:
    source = nn.Linear(30, 20)
    modules = [nn.Linear(30, 20) for _ in range(2)]

    def receive(module: nn.Module) -> list[int]:
        control = connect_control(short_folder / "s")
        receiver = rlcore.WeightReceiver(module, control)
        found = [receiver.receive(100) for _ in range(2)]
        control.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        received = [pool.submit(receive, module) for module in modules]
        controls = accept_controls(short_folder / "s", 2)
        sender = rlcore.WeightSender(source.named_parameters, controls)
        for _ in range(2):
            with torch.no_grad():
                source.weight.add_(1)
            report = sender.send()
        assert [one.result() for one in received] == [[1, 2], [1, 2]]
    assert report.moved_bytes == 2 * 4 * (20 * 30 + 20)
    assert all(torch.equal(one.weight, source.weight) and torch.equal(one.bias, source.bias) for one in modules)
    with pytest.raises(SyncError, match=r"receiver \d is gone"):
        sender.send()
    sender.close()
    for control in controls:
        control.close()


def test_a_sender_needs_a_receiver() -> None:
    with pytest.raises(InvalidInputError, match="WeightSender needs a control channel, got an empty list"):
        rlcore.WeightSender({"weight": torch.ones(2)}, [])
