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
FOLDERS = ("rlcore", "bench", "collectives", "devices", "engines", "examples", "kernels")

ELSEWHERE = {
    "tests/cli/test_cli.py": ("rlcore.__main__",),
    "tests/conformance/test_conformance.py": tuple(
        f"rlcore.conformance.{name}"
        for name in (
            *("accuracy", "bits", "collective_tasks", "ipc_tasks", "launch_tasks", "memory_tasks"),
            *("plugin", "promise", "under_test", "work"),
            *("test_arguments", "test_capabilities", "test_collectives", "test_host_memory", "test_identity"),
            *("test_indices", "test_ipc", "test_launch", "test_memory", "test_profiler", "test_streams"),
            *("test_training", "test_values"),
        )
    ),
    "tests/conformance/test_executor_conformance.py": tuple(
        f"rlcore.conformance.{name}"
        for name in (
            *("ends", "reference"),
            *("inference_executor", "inference_executor.conftest", "inference_executor.test_ends"),
            *("inference_executor.test_generate", "inference_executor.test_moves"),
            *("inference_executor.test_requests", "inference_executor.test_weights"),
            *("train_executor", "train_executor.conftest", "train_executor.test_ends_of_training"),
            *("train_executor.test_offloads", "train_executor.test_state", "train_executor.test_steps"),
            "train_executor.test_sync",
        )
    ),
    "tests/devices/ascend/test_simulated.py": ("rlcore.devices.ascend.attention", "rlcore.devices.ascend.norm"),
    "tests/doctor/test_doctor_command.py": ("rlcore.doctor.examine",),
    "tests/engines/launchers/test_worker_calls.py": (
        "rlcore.engines.launchers.worker_main",
        "rlcore.engines.launchers.worker_server",
    ),
    "tests/engines/launchers/test_ray_hosts.py": ("rlcore.engines.launchers.ray.listing",),
    "tests/engines/sampling/vllm/test_vllm_serve.py": ("rlcore.engines.sampling.vllm.plugin",),
    "tests/examples/test_examples.py": tuple(
        f"rlcore.examples.{name}"
        for name in (
            *("async_grpo", "framework_author", "hardware_buyer", "researcher"),
            *("rlite_tutorial", "sampler_parity"),
        )
    ),
    "tests/examples/test_more_devices.py": ("rlcore.examples.more_devices",),
    "tests/rollout/test_reward_pool.py": ("rlcore.rollout.reward_process",),
    "tests/integrations/test_trl.py": ("rlcore.integrations.trl", "rlcore.integrations.trl_server"),
    "tests/integrations/test_verl.py": (
        "rlcore.integrations.verl",
        *(f"rlcore.integrations.verl.{name}" for name in ("engine", "kernel", "platform", "plugin", "rollout")),
    ),
    "tests/kernels/interpreted_triton.py": ("rlcore.kernels.linear.rows", "rlcore.kernels.linear.tiled"),
}
"""A file of tests -> the modules that no process of `make test` imports: only other processes do, or slow tests."""

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
    return sorted(set(_modules(root)).difference(imported, *ELSEWHERE.values()))


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
    if terminalreporter.stats.get("skipped"):  # else pytest's own last line says it all

        def say() -> None:
            seconds = time.monotonic() - config.stash[_BEGAN]
            terminalreporter.line(f"{last_line(terminalreporter.stats)}, {seconds:.0f} s")

        terminalreporter.summary_stats = say


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
