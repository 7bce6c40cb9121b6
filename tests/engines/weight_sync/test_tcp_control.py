"""Control channels over TCP: both ends know a key, and no message can be made, changed or repeated by others."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.weight_sync.channels import tcp
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.errors import InvalidInputError, SyncError
from tests.engines.weight_sync.channel import drain, fill

KEY = secrets.token_bytes(32)


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def ends(address: str) -> Iterator[tuple[ControlSocket, ControlSocket]]:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(rlcore.accept_controls, address, 1, key=KEY)
        connected = rlcore.connect_control(address, key=KEY)
        found = accepted.result()[0], connected
    yield found
    for end in found:
        end.close()


def test_messages_arrive_whole_and_in_order_both_ways(ends: tuple[ControlSocket, ControlSocket]) -> None:
    long = bytes(range(256)) * 20_000  # more than a socket holds
    for here, there in (ends, ends[::-1]):
        sending = threading.Thread(target=lambda end=here: [end.send(data) for data in (b"", b"one", long)])
        sending.start()
        assert [there.recv(60) for _ in range(3)] == [b"", b"one", long]
        sending.join()


def test_a_sender_and_a_receiver_meet_by_tcp(address: str) -> None:
    given, taken = {"weight": torch.arange(6.0)}, {"weight": torch.zeros(6)}

    def receive() -> int:
        with contextlib.closing(rlcore.connect_control(address, key=KEY)) as control:
            return rlcore.WeightReceiver(taken, control).receive(100)

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        controls = rlcore.accept_controls(address, 1, key=KEY)
        sender = rlcore.WeightSender(given, controls)
        sender.send(version=4)
        assert received.result() == 4
    assert torch.equal(taken["weight"], given["weight"])
    sender.close()
    controls[0].close()


def test_strangers_are_turned_away_and_do_not_end_the_wait(address: str) -> None:
    host, port = tcp.host_and_port(address)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(rlcore.accept_controls, address, 1, key=KEY)
        with pytest.raises(SyncError, match="was refused: what listens there has another key, or has ended"):
            rlcore.connect_control(address, key=secrets.token_bytes(32))
        with socket.create_connection((host, port)) as silent:
            silent.shutdown(socket.SHUT_WR)
            with socket.create_connection((host, port)) as noisy:
                noisy.sendall(bytes(1000))
                control = rlcore.connect_control(address, key=KEY)
        (other,) = accepted.result()
    control.send(b"hello")
    assert other.recv(60) == b"hello"
    control.close()
    other.close()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(rlcore.accept_controls, address, 1, 4.0, key=KEY)
        with pytest.raises(SyncError, match="was refused"):
            rlcore.connect_control(address, key=bytes(16))
        with pytest.raises(SyncError, match=r"0 of 1 receivers .* within 4 s; 1 others did not know the key"):
            accepted.result()


def test_a_listener_that_does_not_know_the_key_is_not_believed(address: str) -> None:
    host, port = tcp.host_and_port(address)

    def pretend(first: bytes) -> None:
        with socket.create_server((host, port)) as listener:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(first + bytes(tcp._NONCE_BYTES))
                with contextlib.suppress(OSError):
                    connection.recv(1 << 10)
                    connection.sendall(bytes(tcp._TAG_BYTES))
                    connection.recv(1 << 10)

    for first, message in {
        tcp._GREETING: "what listens there does not know the key",
        b"HTTP/1.1 400 Bad Request\r\n": "what listens there is no weight sender of this version",
    }.items():
        with ThreadPoolExecutor(1) as pool:
            pretending = pool.submit(pretend, first)
            with pytest.raises(SyncError, match=f"the connection to .* was refused: {message}"):
                rlcore.connect_control(address, key=KEY)
            pretending.result()


def frames(*data: bytes) -> tuple[tcp.MessageSeal, list[bytes]]:
    """Return the seal of the other end, and the bytes of these messages."""
    sending, receiving = (tcp.MessageSeal(KEY, *names) for names in ((b"one", b"two"), (b"two", b"one")))
    found = []
    for one in data:
        found.append(struct.pack("<Q", len(one)) + one + sending.tag(one))
        sending.sent()
    return receiving, found


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda one, two: one.replace(b"first", b"worst") + two, id="changed"),
        pytest.param(lambda one, two: one[:-1] + bytes([one[-1] ^ 1]) + two, id="another tag"),
        pytest.param(lambda one, two: two, id="left out"),
        pytest.param(lambda one, two: two + one, id="another order"),
    ],
)
def test_a_message_that_was_harmed_on_the_way_is_refused(harm: Callable[[bytes, bytes], bytes]) -> None:
    seal, wire = frames(b"first", b"second")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(harm(*wire))
        with pytest.raises(ConnectionError, match="a message was changed, repeated or left out on the way"):
            ControlSocket(ours, seal).recv(60)


def test_a_message_that_is_repeated_or_comes_back_is_refused() -> None:
    seal, (first,) = frames(b"first")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(first * 2)
        control = ControlSocket(ours, seal)
        assert control.recv(60) == b"first"
        with pytest.raises(ConnectionError, match="a message was changed, repeated or left out on the way"):
            control.recv(60)
        control.send(b"mine")
        theirs.sendall(theirs.recv(1 << 10))
        with pytest.raises(ConnectionError, match="a message was changed"):
            control.recv(60)


def test_a_message_of_which_nothing_went_keeps_its_number() -> None:
    receiving, _ = frames()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fill(ours)
        control = ControlSocket(ours, tcp.MessageSeal(KEY, b"one", b"two"))
        with pytest.raises(TimeoutError):
            control.send(b"late", 0.01)
        drain(theirs)
        control.send(b"again", 60)
        assert ControlSocket(theirs, receiving).recv(60) == b"again"


def test_addresses_and_keys_that_are_none_are_refused(address: str, tmp_path: Any) -> None:
    calls: dict[str, tuple[Any, Any]] = {
        "can be reached by others, so it takes key=, at least 16 bytes that both ends .*; got NoneType": (
            address,
            None,
        ),
        "can be reached by others, so it takes key=, .*; got 5 bytes": (address, b"short"),
        "a TCP address is tcp://host:port, such as .*; got 'tcp://127.0.0.1'": ("tcp://127.0.0.1", KEY),
        "a TCP address is tcp://host:port, such as .*; got 'tcp://:5'": ("tcp://:5", KEY),
        "a TCP address is tcp://host:port, such as .*; got 'tcp://h:70000'": ("tcp://h:70000", KEY),
        "a TCP address is tcp://host:port, such as .*; got 'tcp://h:5/path'": ("tcp://h:5/path", KEY),
        "key= is for TCP addresses such as tcp://127.0.0.1:5555; .* is a path": (tmp_path / "s", KEY),
    }
    for message, (given, key) in calls.items():
        for call in (lambda: rlcore.connect_control(given, key=key), lambda: rlcore.accept_controls(given, 1, key=key)):  # noqa: B023
            with pytest.raises(InvalidInputError, match=message):
                call()
    with pytest.raises(InvalidInputError, match=r"cannot listen at tcp://192\.0\.2\.1:5555: "):
        rlcore.accept_controls("tcp://192.0.2.1:5555", 1, key=KEY)
    assert tcp.host_and_port("tcp://[::1]:5") == ("::1", 5)
    started = time.monotonic()
    with pytest.raises(SyncError, match=re.escape(f"no weight sender listens at {address} after 0.1 s")):
        rlcore.connect_control(address, key=KEY, timeout_s=0.1)
    assert time.monotonic() - started < 60
