"""A plugin for micro-benchmarks with pytest-benchmark: ``pytest -p rlcore.bench.pytest_plugin --benchmark-only``.

It puts device, driver and versions into the machine info, keeps the files of each kind of device in a folder of their
own, and refuses to compare with another device. ``rlcore bench compare`` reads what ``--benchmark-json`` writes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from rlcore.bench.measurement.system import new_record
from rlcore.bench.record import Record
from rlcore.bench.reports.export import HEADER, header
from rlcore.device import Device
from rlcore.registry import get_device

_T = TypeVar("_T")

_DEFAULT_STORAGE = "file://./.benchmarks"


@functools.cache
def _here() -> Record:
    """Return the record of the default device (``RLCORE_DEVICE``), without cases."""
    return new_record(get_device())


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the folder of this device before pytest-benchmark opens its storage."""
    if getattr(config.option, "benchmark_storage", None) == _DEFAULT_STORAGE:
        folder = re.sub(r"\W+", "-", _here().device_name).strip("-")
        config.option.benchmark_storage = f"{_DEFAULT_STORAGE}/{folder}"


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info[HEADER] = header(_here())


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(compared_benchmark: dict[str, Any]) -> None:
    """Raises UsageError when the saved run is of another device, or does not say of which."""
    saved = compared_benchmark["machine_info"].get(HEADER)
    theirs = "not recorded" if saved is None else msgspec.convert(saved, Record).device_name
    ours = _here().device_name
    if theirs != ours:
        raise pytest.UsageError(
            f"the saved benchmarks are of another device: theirs is {theirs}, this one is {ours}; "
            "rlcore bench compare puts two devices side by side"
        )


@pytest.fixture
def benchmark_on(benchmark: Any) -> Callable[..., Any]:
    """``benchmark_on(device, function, *args)``: as ``benchmark``, and each call lasts until the device is done."""

    def run(device: Device, function: Callable[..., _T], *args: Any) -> _T:
        def synchronized() -> _T:
            output = function(*args)
            device.synchronize()
            return output

        benchmark.extra_info["device"] = device.name
        output: _T = benchmark(synchronized)
        return output

    return run
