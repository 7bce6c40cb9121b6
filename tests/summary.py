"""The last line of a run, and the check that its tests reached every module."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rlcore", "bench", "collectives", "devices", "engines", "kernels")

ELSEWHERE = {
    "rlcore.__main__": "`python -m rlcore`, in processes of tests/cli",
    "rlcore.conformance": "pytest processes of tests/conformance",
    "rlcore.devices.ascend.attention": "tests/devices/ascend under torch_npu",
    "rlcore.devices.ascend.norm": "tests/devices/ascend under torch_npu",
    "rlcore.doctor.examine": "`rlcore doctor`, in processes of tests/doctor",
    "rlcore.engines.sampling.vllm.plugin": "vLLM's processes, in tests/engines/sampling/vllm",
    "rlcore.engines.launchers.worker_main": "worker processes, in tests/engines/launchers",
    "rlcore.engines.launchers.worker_server": "worker processes, in tests/engines/launchers",
    "rlcore.kernels.linear.rows": "a GPU, or Triton's interpreter in tests/kernels/interpreted_triton.py",
    "rlcore.kernels.linear.tiled": "a GPU, or Triton's interpreter in tests/kernels/interpreted_triton.py",
}
"""Modules, or packages of them, that are imported in other processes than those of the tests -> where."""

_BEGAN = pytest.StashKey[float]()
_IMPORTED = pytest.StashKey[set[str]]()
_UNREACHED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-module", action="store_true", help="fail if there is a module of rlcore that no test imports"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BEGAN] = time.monotonic()
    config.stash[_IMPORTED] = set()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take from a process of pytest-xdist what its tests imported."""
    node.config.stash[_IMPORTED].update(getattr(node, "workeroutput", {}).get("rlcore_modules", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    imported = {name for name in sys.modules if name.partition(".")[0] == "rlcore"}
    if (output := getattr(config, "workeroutput", None)) is not None:
        output["rlcore_modules"] = sorted(imported)
    elif config.getoption("--every-module"):
        config.stash[_UNREACHED] = unreached(config.stash[_IMPORTED] | imported)
        if config.stash[_UNREACHED] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unreached(imported: set[str], root: Path = ROOT) -> list[str]:
    """Return the modules of rlcore that are not ``imported``, but for those of `ELSEWHERE`."""
    return sorted(name for name in set(_modules(root)) - imported if not _is_elsewhere(name))


def _is_elsewhere(name: str) -> bool:
    return any(name == known or name.startswith(f"{known}.") for known in ELSEWHERE)


def _modules(root: Path) -> Iterator[str]:
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.relative_to(root).parents):
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(parts if folder == "rlcore" else ("rlcore", *parts)).removesuffix(".__init__")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name in config.stash.get(_UNREACHED, []):
        terminalreporter.line(f"FAILED: no test imports {name}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped"):  # else pytest's own last line says it all
        reporter.line(f"{last_line(reporter.stats)}, {time.monotonic() - config.stash[_BEGAN]:.0f} s")


def last_line(stats: dict[str, list[Any]]) -> str:
    """Return how many tests ended how, and why the skipped ones were skipped."""
    counts = {name: len(stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    reasons = Counter(_reason(report) for report in stats.get("skipped", []))
    why = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    ended = [f"{count} {name}" for name, count in counts.items() if count]
    return ", ".join(ended) + (f" ({why})" if why else "")


def _reason(report: Any) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    return textwrap.shorten(str(reason).removeprefix("Skipped: "), 80, placeholder="...")
