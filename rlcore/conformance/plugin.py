"""The suite's pytest plugin: its options, the device under test, skips that name the capability, and the report."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.conformance.members import required_members, support_of
from rlcore.conformance.peer import Peer, PeerPool
from rlcore.conformance.report import TEST, SuiteReport
from rlcore.device import Device
from rlcore.errors import RlcoreError
from rlcore.registry import get_device

REPORT = pytest.StashKey[SuiteReport]()
REQUIRED = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlcore conformance")
    group.addoption("--device", metavar="NAME", help='the device to test, such as "cuda" or "cuda:1"')
    group.addoption(
        "--require",
        default="",
        metavar="MEMBERS",
        help="fail, not skip, where the device says that it does not have these: ipc, pool, memory.host_alloc, ...",
    )
    group.addoption("--conformance-json", type=Path, metavar="FILE", help="write what was found about each member")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covers(*members): the members of a device that the test is about")
    name = config.getoption("--device")
    if not name:
        raise pytest.UsageError("name the device to test: --device NAME; `rlcore devices` lists them")
    try:
        device = get_device(name)
        support = support_of(device)
        required = config.getoption("--require").split(",") if config.getoption("--require") else []
        config.stash[REQUIRED] = required_members(required, support)
    except RlcoreError as error:
        raise pytest.UsageError(str(error)) from error
    path = config.getoption("--conformance-json")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise pytest.UsageError(f"--conformance-json {path}: its folder does not exist or cannot be written")
    config.stash[REPORT] = SuiteReport(device, support)
    config.pluginmanager.register(config.stash[REPORT])


def pytest_runtest_setup(item: pytest.Item) -> None:
    report = item.config.stash[REPORT]
    for member in _members(item):
        how = report.support[member]
        if how.support != "unsupported":
            continue
        if member in item.config.stash[REQUIRED]:
            pytest.fail(f"{member} is required, and unsupported on {report.device_name}: {how.reason}", pytrace=False)
        pytest.skip(f"{member} is unsupported on {report.device_name}: {how.reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    phase = yield
    phase.user_properties.append((TEST, [f"{item.path.stem}::{item.name}", *_members(item)]))
    return phase


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if not report.outcomes:
        return
    terminalreporter.section(f"conformance of {report.device_name}")
    for line in report.summary():
        terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    path = config.getoption("--conformance-json")
    is_part = hasattr(config, "workerinput")  # a worker of pytest-xdist; the main process has the whole report
    if path is not None and REPORT in config.stash and not is_part:
        config.stash[REPORT].write(path)


def _members(item: pytest.Item) -> list[str]:
    return [member for mark in item.iter_markers("covers") for member in mark.args]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    """The device under test."""
    return get_device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def peers() -> Iterator[PeerPool]:
    """The other processes, which all tests share."""
    peers = PeerPool()
    yield peers
    peers.close()


@pytest.fixture
def peer(device: Device, peers: PeerPool) -> Peer:
    """A second process with the same device, which tests share unless one of them ends it."""
    return peers.of(device.name)[0]


@pytest.fixture
def other_peer(device: Device, peers: PeerPool) -> Peer:
    """A third process."""
    return peers.of(device.name, 2)[1]
