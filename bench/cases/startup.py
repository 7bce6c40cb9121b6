"""The cost of starting: each run is a new Python process."""

from __future__ import annotations

import subprocess

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.device import Device
from rlcore.process.python_command import python_code

_TIMED_IMPORT = "import time; t = time.perf_counter(); import rlcore; print(time.perf_counter() - t)"
RLCORE = "from rlcore.cli.main import main; main()"
"""The command ``rlcore``."""


def _python(code: str, *arguments: str) -> str:
    command = python_code(code, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _prepare_import(device: Device) -> Work:
    def check(output: str) -> None:
        expect(float(output) > 0, f"the process printed {output!r}")

    # The process times the import itself, so that starting Python is not counted.
    contender = Contender("python", lambda: _python(_TIMED_IMPORT), check, seconds=float)
    return Work((contender,), {}, runs_on="host")


def _prepare_help(device: Device) -> Work:
    def check(output: str) -> None:
        expect("quickstart" in output and "bench" in output, f"not the help of rlcore: {output[:200]!r}")

    contender = Contender("python", lambda: _python(RLCORE, "--help"), check)
    return Work((contender,), {}, runs_on="host")


cases = (
    Case("startup/import", "import rlcore in a new process", _prepare_import, estimate_s=3.0),
    Case("startup/help", "rlcore --help, from starting Python to its end", _prepare_help, estimate_s=4.0),
)
