"""A process knows its descriptors: whose connections hold them, and when they run out."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from rlcore.process import descriptors
from rlcore.process.tcp_sockets import foreign_connections, shut_down
from tests.strangers import ANOTHER_USER, as_root, connected, told_from_others


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limits of descriptors, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def accepted(listener: socket.socket, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(listener.accept()[0]) for _ in range(count)]


@pytest.mark.parametrize(
    ("address", "user"),
    [
        pytest.param("127.0.0.1", os.getuid(), marks=told_from_others),
        pytest.param("0.0.0.0", ANOTHER_USER, marks=as_root),
    ],
)
def test_connections_of_another_user_are_told_and_ended(
    address: str, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.create_server((address, 0)) as listener,
        connected(("127.0.0.1", listener.getsockname()[1]), 3, user=user),
        accepted(listener, 3) as connections,
    ):
        if user == os.getuid():
            assert foreign_connections() == []
            monkeypatch.setattr("os.getuid", lambda: user + 1)
        found = foreign_connections()
        assert {one.descriptor for one in found} == {one.fileno() for one in connections}
        assert {one.user for one in found} == {user}
        shut_down(found[:1])
        ended = [one for one in connections if one.fileno() == found[0].descriptor]
        assert ended[0].recv(1) == b""
        assert len(foreign_connections()) == 2


@told_from_others
def test_a_connection_of_this_process_to_another_users_listener_is_left_alone(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection(listener.getsockname()) as ours, accepted(listener, 1) as (theirs,):
        monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
        assert [one.descriptor for one in foreign_connections()] == [theirs.fileno()]
        listener.close()
        assert foreign_connections() == []
        shut_down([])
        ours.send(b"x")
        assert theirs.recv(1) == b"x"


@pytest.mark.parametrize("is_foreign", [False, pytest.param(True, marks=told_from_others)])
def test_half_of_the_descriptors_in_use_is_told_with_what_holds_them(
    listener: socket.socket, limits: tuple[int, int], is_foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listener.getsockname()[1]
    with connected(("127.0.0.1", port), 30), accepted(listener, 30):
        num_open = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * num_open + 2, limits[1]))
        assert descriptors.what_is_wrong() == ""
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * num_open, limits[1]))
        held = "none of them by a connection of another user"
        if is_foreign:
            held = (
                f"30 connection(s) of other users (user id {os.getuid()}) to this process's listener 127.0.0.1:{port}"
            )
            monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
        found = f"{num_open} of the {2 * num_open} descriptors that this process may have are in use, {held}. Gloo ends"
        assert descriptors.what_is_wrong().startswith(found)


def test_the_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    descriptors.raise_limit()
    most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
