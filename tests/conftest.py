"""Shared by all tests: a clean environment, the devices to run on, and Python in a subprocess."""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import timeit
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warm import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = ["tests.summary", "tests.hosts"]

_PATCHED = {bool, int, float, str, type, types.FunctionType}
"""Of what modules hold: constants, classes and functions. Those whose names begin with "__" torch's compiler adds."""

_WITHOUT = {
    "vllm": "needs vLLM, on a GPU or its build for the CPU; docs/vllm.md says how to run these",
    "sglang": "needs SGLang; docs/sglang.md says how to run these",
    "ray": "needs Ray; run: pip install 'rlcore[ray]'",
}
"""Why a test is skipped that has the marker of a package which is not installed."""

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@functools.cache
def _missing_gpus(needed: int) -> str:
    """Why ``needed`` CUDA devices cannot be had here, or ""."""
    import torch

    if torch.version.cuda is None:
        return f"needs {needed} CUDA device(s); this torch {torch.__version__} has no CUDA"
    found = torch.cuda.device_count()
    return "" if found >= needed else f"needs {needed} CUDA device(s), found {found}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--never-skip",
        action="append",
        default=[],
        metavar="MARKER",
        help="a test with this marker that is skipped, or a file that is, has failed: what it needs should be there",
    )
    parser.addoption("--chaos-minutes", type=float, default=0.5, help="how long tests/chaos runs `rlcore chaos`")


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and nohup's SIGHUP; every process that a test starts would do so too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(
            signal.SIGHUP, lambda *_: None
        )  # unlike an ignored signal, a handled one is no child's inheritance


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector leave the objects of torch, transformers and the tests alone.

    They are there to stay: to look through them takes 0.4 s each time, and processes that are forked would copy them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)  # when those that are not chosen have gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests may take longest begin first, then those with the most tests: `make` gives each file to one
    process, and waits for the last."""
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), *(mark.args if mark else [0.0]))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-longest[item.path], -tests[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and any(map(item.get_closest_marker, item.config.getoption("--never-skip"))):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and collector.config.getoption("--never-skip"):
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome, report.longrepr = "failed", f"--never-skip: {reason}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for package, reason in _WITHOUT.items():
        if item.get_closest_marker(package) and importlib.util.find_spec(package) is None:
            pytest.skip(reason)
    if item.get_closest_marker("hosts"):
        from tests.hosts import why_no_hosts

        if reason := why_no_hosts():
            pytest.skip(reason)
    for marker, needed in (("gpu", 1), ("multigpu", 2)):
        if item.get_closest_marker(marker) and (reason := _missing_gpus(needed)):
            pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def _rlcore_stays_as_it_is() -> Iterator[None]:
    """What a file patches and leaves so would fail another, whichever comes later in the same process."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "rlcore"]
    before = [(module, dict(vars(module))) for module in modules]
    yield
    left = [
        f"{module.__name__}.{name}"
        for module, found in before
        if any(vars(module).get(name) is not value for name, value in found.items())  # seldom
        for name, value in found.items()
        if type(value) in _PATCHED and vars(module).get(name) != value and not name.startswith("__")
    ]
    assert not left, f"this file changed {', '.join(left)} and did not take it back"


@pytest.fixture(scope="session", autouse=True)
def _a_command_is_made_once() -> Iterator[None]:
    """Typer's CliRunner makes the whole command again at each call, which takes longer than what most calls do."""
    from typer.main import get_command

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(get_command))
        yield


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RLCORE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def short_runtime_folder() -> Iterator[Path]:
    """For RLCORE_RUNTIME where this process exports: it listens for ever where it first did. Tests connect to its
    sockets as a program does that knows nothing of rlcore, by paths of at most 107 bytes."""
    is_short = len(os.fsencode(tempfile.gettempdir())) < 50
    folder = Path(tempfile.mkdtemp(prefix="rl-", dir=None if is_short else "/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``made_once(name, make)``: a folder that ``make(folder)`` makes for all processes of this run of pytest.

    The first that asks makes it, the others wait for it. What fails to be made is tried again by the next that asks.
    """
    of_run = tmp_path_factory.getbasetemp()
    of_run = of_run.parent if hasattr(request.config, "workerinput") else of_run  # of pytest-xdist

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, is_made = of_run / f"once-{name}", of_run / f"once-{name}.made"
        with open(of_run / f"once-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_made.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                is_made.touch()
        return folder

    return made


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """Each device this project can test on; absent hardware is a skip with its reason."""
    from rlcore.registry import get_device

    return get_device(request.param)


@pytest.fixture
def run_python() -> RunPython:
    """Run code (or ``["-m", "module", ...]``) with this interpreter, ``env`` added to the environment."""

    def run(
        code: str | list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        arguments = ["-c", code] if isinstance(code, str) else code
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | (env or {}),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    return run


@pytest.fixture
def times_as_long() -> Callable[[Callable[[], Any], Callable[[], Any]], float]:
    """How many times as long a call takes as another: the fastest of many short runs of both, by turns.

    A machine five times slower is so for both, and what else it does only makes a run slower.
    """

    def compare(call: Callable[[], Any], beside: Callable[[], Any]) -> float:
        runs = [[timeit.timeit(each, number=1000) for each in (call, beside)] for _ in range(200)]
        found, reference = map(min, zip(*runs, strict=True))
        return found / reference

    return compare


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """The folder of a control group with 64 MiB of memory."""
    root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"  # version 1
    if not root.is_dir():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    folder = root / f"rlcore-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a control group (root has it): {error}")
    try:
        try:
            (folder / limit).write_text(str(64 << 20))
        except OSError as error:
            pytest.skip(f"needs a control group whose memory can be limited: {error}")
        yield folder
    finally:
        folder.rmdir()
