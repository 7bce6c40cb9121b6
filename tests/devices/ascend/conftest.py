"""The environment of the simulated CANN, made once a session."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.devices.ascend import simulation

SIM = Path(__file__).resolve().parents[2] / "plugins" / "cann_sim" / "rlcore_cann_sim"

_LOGGED = pytest.StashKey[set[str]]()

RunSimulated = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def _simulated(made_once: Callable[..., Path]) -> Iterator[dict[str, str]]:
    """Variables of the environment. CANN_SIM_ENVIRONMENT names a folder to keep it in; CANN_SIM_WHEELS has wheels."""
    for tool in ("gcc", "g++", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"the simulated CANN cannot be built: there is no {tool}")
    folder = Path(os.environ.get("CANN_SIM_ENVIRONMENT") or made_once("cann_sim", _make))
    if not (folder / "activate").exists():  # the user's
        _make(folder)
    lines = (folder / "activate").read_text().splitlines()
    with _removing_what_is_left():
        yield dict(line.removeprefix("export ").replace("'", "").split("=", 1) for line in lines)


@contextlib.contextmanager
def _removing_what_is_left() -> Iterator[None]:
    """Remove the simulation's files in shared memory at the end, unless another process of tests still uses them."""
    with Path(f"/dev/shm/cann_sim-{os.getuid()}").open("ab") as books_of_memory:
        fcntl.flock(books_of_memory, fcntl.LOCK_SH)
        yield
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(books_of_memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in Path("/dev/shm").glob(f"cann_sim-{os.getuid()}*"):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    command = [sys.executable, str(SIM / "environment.py"), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot be installed" in made.stderr:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr


@pytest.fixture
def libraries(_simulated: dict[str, str]) -> Path:
    """The folder of the stand-in's libraries."""
    return Path(_simulated["LD_LIBRARY_PATH"])


@pytest.fixture(scope="session")
def run_simulated_in(_simulated: dict[str, str], request: pytest.FixtureRequest) -> RunSimulated:
    """``run_simulated_in(folder, *arguments)``: Python where ``import torch`` brings torch_npu over the simulated CANN.

    The log of operators, simulated and refused, is ``cann.log`` there. A variable that is None is not set.
    """

    def run(
        folder: Path, *arguments: str, timeout_s: float = 580, **env: str | None
    ) -> subprocess.CompletedProcess[str]:
        asked = os.environ | _simulated | {"CANN_SIM_LOG": str(folder / "cann.log")} | env
        variables = {name: value for name, value in asked.items() if value is not None}
        python = Path(_simulated["PATH"].split(":")[0], "python")
        command = [str(python), *arguments]
        found = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        log = Path(variables.get("CANN_SIM_LOG", ""))
        request.config.stash.setdefault(_LOGGED, set()).update(log.read_text().splitlines() if log.is_file() else [])
        return found

    return run


@pytest.fixture
def run_simulated(run_simulated_in: RunSimulated, tmp_path: Path) -> RunSimulated:
    """``run_simulated(*arguments)``, in an empty folder."""
    return functools.partial(run_simulated_in, tmp_path)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What all tests together asked of the stand-in."""
    if lines := config.stash.get(_LOGGED, None):
        terminalreporter.section("simulated CANN")
        terminalreporter.line(str(simulation.counted("simulated CANN", lines)))
