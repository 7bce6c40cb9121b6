"""The environment of the simulated CANN, made once a session."""

from __future__ import annotations

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
def _simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of the environment. CANN_SIM_ENVIRONMENT names a folder to keep it in; CANN_SIM_WHEELS has wheels."""
    for tool in ("gcc", "g++", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"the simulated CANN cannot be built: there is no {tool}")
    kept = os.environ.get("CANN_SIM_ENVIRONMENT")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("cann_sim") / "environment"
    if not (folder / "activate").exists():
        command = [sys.executable, str(SIM / "environment.py"), str(folder)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if "cannot be installed" in made.stderr:
            pytest.skip(made.stderr.strip().splitlines()[-1])
        assert made.returncode == 0, made.stderr
    lines = (folder / "activate").read_text().splitlines()
    yield dict(line.removeprefix("export ").replace("'", "").split("=", 1) for line in lines)
    for left in Path("/dev/shm").glob(f"cann_sim-{os.getuid()}*"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


@pytest.fixture
def libraries(_simulated: dict[str, str]) -> Path:
    """The folder of the stand-in's libraries."""
    return Path(_simulated["LD_LIBRARY_PATH"])


@pytest.fixture
def run_simulated(_simulated: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> RunSimulated:
    """Run Python where ``import torch`` brings the real torch_npu over the simulated CANN, in an empty folder.

    The log of operators, simulated and refused, is ``cann.log`` there. A variable that is None is not set.
    """

    def run(*arguments: str, timeout_s: float = 580, **env: str | None) -> subprocess.CompletedProcess[str]:
        asked = os.environ | _simulated | {"CANN_SIM_LOG": str(tmp_path / "cann.log")} | env
        variables = {name: value for name, value in asked.items() if value is not None}
        python = Path(_simulated["PATH"].split(":")[0], "python")
        command = [str(python), *arguments]
        found = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        log = Path(variables.get("CANN_SIM_LOG", ""))
        request.config.stash.setdefault(_LOGGED, set()).update(log.read_text().splitlines() if log.is_file() else [])
        return found

    return run


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What all tests together asked of the stand-in."""
    if lines := config.stash.get(_LOGGED, None):
        terminalreporter.section("simulated CANN")
        terminalreporter.line(str(simulation.counted("simulated CANN", lines)))
