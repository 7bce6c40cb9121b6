"""Runs of the conformance suite in processes of their own, two at a time; and simdev, installed as a user would."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.warm import warm

HERE = Path(__file__).resolve().parent
SIMDEV = HERE.parent / "plugins" / "simdev"


@dataclass(frozen=True)
class Outcome:
    returncode: int
    output: str
    report: dict[str, Any]

    def tests(self, result: str) -> set[str]:
        """Names of the tests that ended so."""
        return {test for test, found in self.report["tests"].items() if found["result"] == result}


class Runs:
    """Starts every run that the session's tests will ask for, and has each wait for its own."""

    def __init__(self, folder: Path) -> None:
        self.simdev_python = Path()
        self._folder = folder
        self._threads = ThreadPoolExecutor(2)
        self._outcomes: dict[Any, Future[Outcome]] = {}

    def start(self, run: Any) -> None:
        if run not in self._outcomes:
            self._outcomes[run] = self._threads.submit(self._run, run, self._folder / str(len(self._outcomes)))

    def outcome(self, run: Any) -> Outcome:
        self.start(run)
        return self._outcomes[run].result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _run(self, run: Any, folder: Path) -> Outcome:
        folder.mkdir()
        python = self.simdev_python if run.device == "simdev" else Path(sys.executable)
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE), str(HERE.parents[1])])
        peers = ("-p", "warm_peers") if run.device == "cpu" else ()  # a vendor's library may not survive a fork
        found = subprocess.run(
            [*warm(python=python), "-m", "pytest", "-p", "no:cacheprovider", *peers, *run.arguments],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "SIMDEV_FAULT": run.fault, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=850,
            check=False,
        )
        report = folder / "report.json"
        return Outcome(found.returncode, found.stdout, json.loads(report.read_text()) if report.exists() else {})


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    own = (item for item in request.session.items if item.path.parent == HERE and hasattr(item, "callspec"))
    wanted = [item.callspec.params["run"] for item in own if "run" in item.callspec.params]
    runs = Runs(tmp_path_factory.mktemp("runs"))
    for run in wanted:
        if run.device != "simdev":
            runs.start(run)  # while simdev is built
    if any(run.device == "simdev" for run in wanted):
        runs.simdev_python = request.getfixturevalue("simdev_python")
    for run in wanted:
        runs.start(run)
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def simdev_sources() -> str:
    return "".join(path.read_text() for pattern in ("*.py", "*.cpp", "*.h") for path in SIMDEV.rglob(pattern))


@pytest.fixture(scope="session")
def simdev_python(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of a virtual environment with simdev, and with what this interpreter has."""
    if reason := _why_no_extension():
        pytest.skip(f"simdev cannot be built: {reason}")
    cache = pytestconfig.cache.mkdir("simdev")
    with (cache.parent / "simdev.lock").open("w") as lock:  # two files of tests may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        wheel = _built(cache, tmp_path_factory)
    environment = tmp_path_factory.mktemp("simdev") / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    folders = [folder for folder in site.getsitepackages() if Path(folder).is_dir()]
    (packages / "parent.pth").write_text("".join(f"import site; site.addsitedir({folder!a})\n" for folder in folders))
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    yield python
    Path(f"/dev/shm/simdev-{os.getuid()}").unlink(missing_ok=True)


def _why_no_extension() -> str:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}"
    headers = Path(sysconfig.get_paths()["include"])
    return "" if (headers / "Python.h").exists() else f"{headers} has no Python.h; install python3-dev"


def _built(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of simdev as it is now, for this Python and torch; kept between sessions."""
    sources = sorted(path for path in SIMDEV.rglob("*") if path.suffix in {".py", ".toml", ".h", ".cpp"})
    digest = hashlib.sha256(f"{sys.version} {torch.__version__}".encode())
    for path in sources:
        digest.update(path.relative_to(SIMDEV).as_posix().encode() + path.read_bytes())
    kept = cache / digest.hexdigest()[:16]
    if not kept.exists():
        work = tmp_path_factory.mktemp("build")
        shutil.copytree(SIMDEV, work / "source")
        _pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(work / "wheel"), str(work / "source"))
        shutil.rmtree(cache)
        cache.mkdir()
        (work / "wheel").rename(kept)
    (wheel,) = kept.glob("*.whl")
    return wheel


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
