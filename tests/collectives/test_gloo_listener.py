"""A listener whose address a rank has published is closed to new connections, and to those alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from rlcore.collectives import gloo_listener
from rlcore.collectives.gloo_listener import GlooListener, _packed
from rlcore.errors import CollectiveTimeoutError
from rlcore.process.tcp_sockets import SYN_SENT, SocketAddress, tcp_sockets
from tests.strangers import filters_sockets


def refuse(*_: object) -> None:
    raise PermissionError


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def listener_at(address: tuple[str, int]) -> GlooListener:
    store = HashStore()
    store.set("0/0", b"host\0" + _packed(SocketAddress(*address)) + b"\0" * 16)  # type: ignore[arg-type]  # bytes too
    return GlooListener(store, rank=0, world_size=1)


@filters_sockets
def test_a_closed_listener_drops_requests_and_keeps_its_connections(server: socket.socket) -> None:
    listener = listener_at(server.getsockname())
    with socket.create_connection(server.getsockname()) as early, socket.socket() as late:
        accepted, _ = server.accept()
        listener.wait_until_connected(60)
        listener.close()
        late.setblocking(False)
        late.connect_ex(server.getsockname())
        assert [one.state for one in tcp_sockets() if one.local == late.getsockname()] == [SYN_SENT]
        with pytest.raises(
            CollectiveTimeoutError, match=r"^rank\(s\) 0 did not accept a connection of rank 0 within 0.05 s$"
        ) as caught:
            listener.wait_until_connected(0.05)
        assert caught.value.ranks == (0,)
        with accepted:
            early.send(b"x")
            assert accepted.recv(1) == b"x"


def test_another_listener_of_the_process_stays_open(server: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gloo:
        listener_at(gloo.getsockname()).close()
        socket.create_connection(server.getsockname(), timeout=60).close()


def test_a_lazy_group_keeps_its_listener_because_ranks_connect_later(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    listener = listener_at(server.getsockname())
    listener.wait_until_connected(60)
    listener.close()
    socket.create_connection(server.getsockname(), timeout=60).close()


@pytest.mark.parametrize("name", ["tcp_sockets", "_drop_requests"])
def test_a_system_that_hides_sockets_or_takes_no_filter_fails_no_group(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gloo_listener, name, refuse)
    listener = listener_at(server.getsockname())
    listener.wait_until_connected(60)
    listener.close()
    socket.create_connection(server.getsockname(), timeout=60).close()
