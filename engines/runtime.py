"""``rlcore.init``: defaults for every engine built afterwards. Optional."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore import spans
from rlcore.arguments import FLAG, LIST, PATH, TEXT, Kind, optional, takes
from rlcore.engines.launchers.launch import choose_launcher
from rlcore.engines.launchers.ray.cluster import connect
from rlcore.errors import InvalidInputError
from rlcore.registry import get_device
from rlcore.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Defaults for engines whose ``build`` does not name a device or launcher."""

    devices: tuple[str, ...] | None = None
    """Devices to place workers on, such as ("cuda:0", "cuda:1"); None is ``get_device()``."""
    launcher: str | None = None
    """How workers run; None is "inline" for an engine of one worker, else "process"."""

    def __post_init__(self) -> None:
        choose_launcher(self.launcher, 1)
        if self.devices is not None and not self.devices:
            raise InvalidInputError("devices must name at least one device, got an empty list")


_current = Runtime()
_DEVICES = Kind("a device's name or a list of them", lambda value: TEXT.has(value) or LIST.has(value))


@takes(
    "init()",
    devices=optional(_DEVICES),
    address=optional(TEXT),
    insecure_cluster=FLAG,
    trace=optional(PATH),
    trace_kernels=FLAG,
)
def init(
    devices: Sequence[str] | str | None = None,
    launcher: str | None = None,
    log: str | None = None,
    debug: str | None = None,
    *,
    address: str | None = None,
    insecure_cluster: bool = False,
    trace: str | Path | None = None,
    trace_kernels: bool = False,
) -> Runtime:
    """Set the defaults of this process and check that the devices can be had.

    Args:
        devices: names such as "cuda:0"; None keeps the rule of ``get_device()``.
        launcher: "inline" runs workers in this process, "process" in a child for each device, "ray" on the hosts of a
            Ray cluster, "torchrun" joins the world this process was started in; None decides by the number of workers.
        log: level of rlcore's log on stderr: DEBUG, INFO, WARNING or ERROR; None leaves logging alone.
        debug: as ``RLCORE_DEBUG``.
        address: of a Ray cluster, "auto" for the one of this host; the launcher is "ray" then. Without one "ray" starts
            a cluster of this host alone, which goes with the program.
        insecure_cluster: accept a Ray cluster that lets everybody in who reaches its ports.
        trace: a folder into which this process, and the workers of engines that are built afterwards, write what they
            do and when; at the end of the program ``trace.html`` and ``trace.json`` are made there. Under
            ``rlcore trace`` that one's folder is used.
        trace_kernels: have torch's profiler record one call of each method of a worker.

    Raises:
        InvalidInputError: an unknown launcher, level or debug mode, or a folder that cannot be written.
        MissingDependencyError: Ray is not installed.
        DeviceError: a device that is unknown or not available.
    """
    global _current  # noqa: PLW0603 - the one process-wide default, set by the user
    names = (devices,) if isinstance(devices, str) else tuple(devices) if devices is not None else None
    if address is not None:
        if launcher not in (None, "ray"):
            raise InvalidInputError(f"address is that of a Ray cluster, for launcher='ray', got launcher={launcher!r}")
        launcher = "ray"
    runtime = Runtime(devices=names, launcher=launcher)
    if launcher == "ray":
        connect(address, is_insecure=insecure_cluster)
    else:
        for name in names or ():
            get_device(name)
    if log is not None:
        _log_to_stderr(log)
    if debug is not None:
        os.environ["RLCORE_DEBUG"] = Settings.from_env({"RLCORE_DEBUG": debug}).debug
    if trace is not None and spans.recorder is None:
        folder = spans.start(Path(trace), records_kernels=trace_kernels).folder
        atexit.register(_report_trace, folder, os.getpid())
    _current = runtime
    return runtime


def _report_trace(folder: Path, owner: int) -> None:
    """Make the pages of a trace in a process of their own: this one is at its end."""
    if os.getpid() == owner and os.environ.get("RANK", "0") == "0":
        environment = {name: value for name, value in os.environ.items() if name != "RLCORE_TRACE"}
        subprocess.run([sys.executable, "-m", "rlcore", "trace", "--report", str(folder)], env=environment, check=False)


def current() -> Runtime:
    return _current


def _log_to_stderr(level: str) -> None:
    checked = Settings.from_env({"RLCORE_LOG_LEVEL": level}).log_level
    os.environ["RLCORE_LOG_LEVEL"] = checked  # worker processes read it
    logger = logging.getLogger("rlcore")
    logger.setLevel(checked)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
