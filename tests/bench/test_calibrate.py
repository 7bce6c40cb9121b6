"""Limits are measured, kept while they hold for the machine, and every result is a share of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rlcore.bench.measurement import calibrate as module
from rlcore.bench.measurement import telemetry
from rlcore.bench.measurement.calibrate import Store, calibrate
from rlcore.bench.measurement.isolated import with_limits
from rlcore.bench.measurement.system import new_record
from rlcore.bench.record import Calibration, CaseResult, Metric, Record
from rlcore.bench.reports.summary import peak, share_of_limit, unit
from rlcore.registry import get_device


def limits(age: timedelta = timedelta(0), **values: float) -> Calibration:
    return Calibration(measured_at=(datetime.now(UTC) - age).isoformat(), limits=values or {"memory": 1e10})


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Record:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    return new_record(get_device("cpu"))


def test_limits_of_a_host_are_those_of_its_products_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOST_MEMORY_BYTES", 1 << 24)
    monkeypatch.setattr(module, "_HOST_PRODUCTS", ((256, 256, 256),))
    found = calibrate(get_device("cpu"), "quick")
    assert found.limits.keys() == {"product/float32", "product/float16", "product/bfloat16", "memory"}
    assert (
        1e7 < found.limits["product/float32"] < 1e14
    )  # between a hundredth of a core of long ago and no host there is
    assert 1e6 < found.limits["memory"] < 1e13
    assert found.blocked["to_device/pinned"].endswith("the device is the host itself")
    assert found.blocked.keys() == {
        "to_device/pinned",
        "to_device/pageable",
        "to_host/pinned",
        "to_host/pageable",
        "link",
    }


@pytest.mark.gpu
def test_limits_of_a_gpu_are_below_its_datasheet_and_above_half() -> None:
    device = get_device("cuda")
    found = calibrate(device, "standard")
    system = new_record(device).system
    for name in ("product/bfloat16", "memory"):
        if sheet := peak(system, name):
            assert 0.5 < found.limits[name] / sheet.value <= 1.0
    assert found.limits["to_device/pinned"] > found.limits["to_device/pageable"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_product_that_torch_does_not_have_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOST_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_HOST_PRODUCTS", ((8, 8, 8),))
    monkeypatch.setattr(module, "_DTYPES", (torch.complex32,))
    found = calibrate(get_device("cpu"), "quick")
    assert found.limits.keys() == {"memory"}
    assert "not implemented for 'ComplexHalf'" in found.blocked["product/complex32"]


# ----------------------------------------------------------------------------------------------------- store


def test_stored_limits_are_found_again_until_something_changes(record: Record) -> None:
    kept = limits()
    assert Store(record).load() is None
    Store(record).save(kept)
    assert Store(record).load() == kept
    for change in (
        {"framework": "torch 9.9"},
        {"other_software_stack": {"driver": "1"}},
        {"host_processor_core_count": 99},
    ):
        system = msgspec.structs.replace(record.system, **change)
        assert Store(msgspec.structs.replace(record, system=system)).load() is None
    assert Store(msgspec.structs.replace(record, num_threads=77)).load() is None


def test_limits_of_a_quick_run_are_not_used_by_a_full_one(record: Record) -> None:
    runs = {effort: Store(msgspec.structs.replace(record, effort=effort)) for effort in ("quick", "standard", "full")}
    runs["standard"].save(limits())
    assert [effort for effort, store in runs.items() if store.load()] == ["quick", "standard"]


@pytest.mark.parametrize("data", [None, b"", b"{}", b'{"valid_for": {}, "calibration": {}}'])
def test_stale_or_damaged_limits_are_not_used(record: Record, data: bytes | None) -> None:
    store = Store(record)
    store.save(limits(age=timedelta(days=8)))
    if data is not None:
        store._path.write_bytes(data)
    assert store.load() is None


def test_limits_are_measured_when_absent_or_when_told_and_else_read(record: Record) -> None:
    class Counting:
        count = 0

        def calibrate(self, effort: str) -> Calibration:
            self.count += 1
            return limits(memory=self.count * 1e9)

    measuring: Any = Counting()
    first, second = (with_limits(measuring, record, is_forced=False) for _ in range(2))
    assert first.calibration == second.calibration
    assert measuring.count == 1
    third = with_limits(measuring, record, is_forced=True)
    assert third.calibration is not None and third.calibration.limits == {"memory": 2e9}


def test_limits_of_a_host_that_others_used_meanwhile_say_so_and_are_not_used_again(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HOST_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_HOST_PRODUCTS", ((64, 64, 64),))
    monkeypatch.setitem(module._BUDGET_S, "standard", 0.01)
    for share, expected in ((0.0, []), (0.5, ["shared: others used the host's processors"])):
        monkeypatch.setattr(telemetry.Monitor, "_host_share_of_others", lambda self, share=share: share)
        found = calibrate(get_device("cpu"), "standard")
        assert found.marks == expected
        Store(record).save(found)
        assert (Store(record).load() is None) == bool(expected)
    accelerated = msgspec.structs.replace(record.system, accelerator_model_name="NVIDIA H200")
    store = Store(msgspec.structs.replace(record, system=accelerated))
    store.save(found)
    assert store.load() == found


# ---------------------------------------------------------------------------------------------------- shares


def result(needs: dict[str, int], *samples: float, device: float | None = None) -> CaseResult:
    metrics = [Metric(name="time", unit="s", samples=list(samples))]
    if device is not None:
        metrics.append(Metric(name="device_time", unit="s", samples=[device]))
    return CaseResult(name="a", implementation="x", status="pass", params={}, metrics=metrics, limits=needs)


def test_share_is_of_the_limit_that_takes_longest() -> None:
    known = limits(**{"memory": 1e9, "product/float32": 1e12})
    both = share_of_limit(result({"memory": 10**9, "product/float32": 10**12 // 2}, 1.0, 2.0, 9.0), known)
    assert both is not None and (both.limit, both.value) == ("memory", 0.5)
    assert share_of_limit(result({"memory": 10**9}, 9.0, device=1.25), known).value == pytest.approx(0.8)


def test_share_without_a_need_or_a_limit_is_unknown() -> None:
    assert share_of_limit(result({}, 1.0), limits()) is None
    assert share_of_limit(result({"link": 5}, 1.0), limits()) is None
    assert share_of_limit(result({"memory": 5}, 1.0), None) is None


def test_peaks_have_a_source_and_a_date_and_unknown_is_none(record: Record) -> None:
    h200 = msgspec.structs.replace(record.system, accelerator_model_name="NVIDIA H200")
    found = peak(h200, "product/bfloat16")
    assert found is not None and found.value == 989e12 and found.source.startswith("https://") and found.retrieved
    assert peak(h200, "product/float64") is None
    assert peak(msgspec.structs.replace(h200, accelerator_model_name="Ascend910B2"), "memory") is None
    assert peak(record.system, "memory") is None
    assert (unit("product/float32"), unit("link")) == ("FLOP/s", "B/s")
