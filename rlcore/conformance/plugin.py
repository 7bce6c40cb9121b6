"""The suites' pytest plugin: options, what is under test, skips that name what is lacking, and the report."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.conformance.members import required_members, support_of
from rlcore.conformance.peer import Peer, PeerPool
from rlcore.conformance.promise import ALWAYS, CLASSES, METHODS, Kind
from rlcore.conformance.report import LACKING, PROMISE, TEST, SuiteReport
from rlcore.device import Device
from rlcore.errors import RlcoreError, UnsupportedError
from rlcore.registry import executor_class, get_device
from rlcore.types import Capability

REPORT = pytest.StashKey[SuiteReport]()
REQUIRED = pytest.StashKey[frozenset[str]]()
_SUITES = {"train_executor": "train", "inference_executor": "inference"}
"""Folder of a suite of executors -> their kind."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlcore conformance")
    group.addoption(
        "--device",
        metavar="NAME",
        help='the device to test, such as "cuda" or "cuda:1"; with an executor\'s name, that on which the executor is '
        "tested, and the device itself is not: without it, the one that rlcore.get_device() gives",
    )
    for kind in CLASSES:
        group.addoption(f"--{kind}-executor", metavar="NAME", help=f"test this {kind} executor, and nothing else")
    group.addoption(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="a small Hugging Face model folder for the executor; without it, a tiny Qwen2 of random weights",
    )
    group.addoption(
        "--build-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help='options of Engine.build for the executor, such as \'{"dtype": "float32"}\'',
    )
    group.addoption(
        "--require",
        default="",
        metavar="MEMBERS",
        help="fail, not skip, where the device or executor says that it does not have these: ipc, pool, "
        "memory.host_alloc, ...; of an executor its methods: submit, save, ...",
    )
    group.addoption("--conformance-json", type=Path, metavar="FILE", help="write what was found about each member")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covers(*members): the members of a device that the test is about")
    config.addinivalue_line("markers", "promise(contract, *methods): what an executor promises, and the methods")
    try:
        report, required = _subject(config)
    except RlcoreError as error:
        raise pytest.UsageError(str(error)) from error
    path = config.getoption("--conformance-json")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise pytest.UsageError(f"--conformance-json {path}: its folder does not exist or cannot be written")
    config.stash[REPORT], config.stash[REQUIRED] = report, required
    config.pluginmanager.register(report)


def _subject(config: pytest.Config) -> tuple[SuiteReport, frozenset[str]]:
    """Return a report on what the options name, and the features that it must have."""
    name, kinds = config.getoption("--device"), [kind for kind in CLASSES if config.getoption(f"--{kind}-executor")]
    names = config.getoption("--require").split(",") if config.getoption("--require") else []
    if len(kinds) > 1:
        raise pytest.UsageError("--train-executor and --inference-executor are tested one at a time")
    if not kinds:
        if not name:
            raise pytest.UsageError(
                "name the device to test: --device NAME; `rlcore devices` lists them; or an executor: "
                "--train-executor NAME, --inference-executor NAME"
            )
        device = get_device(name)
        support = support_of(device)
        return SuiteReport(device, support), required_members(names, support)
    kind, device = kinds[0], get_device(name)
    executor = config.getoption(f"--{kind}-executor")
    executor_class(kind, executor)
    support = dict.fromkeys((_named(kind, method) for method in METHODS[kind]), Capability("native", device.evidence))
    required = required_members([_named(kind, name) for name in (*names, *ALWAYS[kind])], support)
    return SuiteReport(device, support, {"kind": kind, "name": executor}), required


def _named(kind: Kind, method: str) -> str:
    return f"{CLASSES[kind]}.{method}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Another suite than the one that was asked for."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(Path(__file__).parent):
        return None
    executor = config.stash[REPORT].executor
    wanted = executor["kind"] if executor else None
    return True if _SUITES.get(collection_path.parent.name) != wanted else None


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
    if phase.failed and item.get_closest_marker("promise"):
        error = None if call.excinfo is None else call.excinfo.value
        if isinstance(error, UnsupportedError):
            _lacking(item, phase, error)
        else:
            _broken(item, phase)
    return phase


def _lacking(item: pytest.Item, phase: pytest.TestReport, error: UnsupportedError) -> None:
    """The executor says that it cannot do this."""
    report, member = item.config.stash[REPORT], _members(item)[0]
    text = f"{member} is unsupported by {report.subject}: {error.feature}: {error.reason}"
    if member in item.config.stash[REQUIRED]:
        phase.longrepr = f"required, and {text}"
        return
    phase.user_properties.append((LACKING, error.reason))
    phase.outcome, phase.longrepr = "skipped", (str(item.path), item.reportinfo()[1] or 0, f"Skipped: {text}")


def _broken(item: pytest.Item, phase: pytest.TestReport) -> None:
    (contract,) = {mark.args[0] for mark in item.iter_markers("promise")}
    text = f"{' and '.join(_members(item))}: {contract}"
    phase.sections.insert(0, ("broken promise", text))
    phase.user_properties.append((PROMISE, f"{text} ({item.path.stem}::{item.name})"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if not report.outcomes:
        return
    terminalreporter.section(f"conformance of {report.subject}")
    for line in report.summary():
        terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    path = config.getoption("--conformance-json")
    is_part = hasattr(config, "workerinput")  # a worker of pytest-xdist; the main process has the whole report
    if path is not None and REPORT in config.stash and not is_part:
        config.stash[REPORT].write(path)


def _members(item: pytest.Item) -> list[str]:
    executor = item.config.stash[REPORT].executor
    if executor is None:
        return [member for mark in item.iter_markers("covers") for member in mark.args]
    kind: Any = executor["kind"]
    return [_named(kind, method) for mark in item.iter_markers("promise") for method in mark.args[1:]]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    """The device under test, or of the executor under test."""
    return get_device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of the executor under test."""
    from rlcore.conformance.tiny_model import write_tiny_model

    given: Path | None = pytestconfig.getoption("--model")
    return given or write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


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
