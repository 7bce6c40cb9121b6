"""What rlcore's vllm executor uses on NPUs is in vllm-ascend and in the vLLM beside it; what it refuses there."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlcore
from rlcore.engines.launchers import process
from rlcore.engines.sampling.vllm import ascend
from rlcore.engines.sampling.vllm import mapped_allocations as regions
from rlcore.engines.sampling.vllm.executor import VllmExecutor
from rlcore.errors import DeviceError, InvalidInputError, UnsupportedError
from rlcore.registry import registry
from rlcore.types import DeviceSpec
from tests.devices.ascend import vllm_contract as contract

RECORD: dict[str, Any] = json.loads(contract.RECORD.read_text())


def test_the_record_is_of_the_versions_that_are_accepted() -> None:
    assert tuple(RECORD) == ascend.VERSIONS
    for one in RECORD.values():
        assert len(one["wheels"]) == 2 and all(
            re.fullmatch("[0-9a-f]{64}", digest) for digest in one["wheels"].values()
        )


@pytest.mark.parametrize("version", RECORD)
def test_a_version_has_the_switch_of_the_vendors_order(version: str) -> None:
    assert RECORD[version]["switches"] == [ascend._FORMAT_SWITCH]


def test_uses_are_collected_from_the_code() -> None:
    found = contract.uses()
    assert found["vllm_ascend.device_allocator.camem.CaMemAllocator"] == {"get_instance", "pointer_to_data"}
    assert found["vllm_ascend.device_allocator.camem.AllocationData"] == {"handle", "tag"}
    assert {"vllm_ascend.device_allocator.camem.create_and_map", contract.vllm.ARGUMENTS} <= found.keys()
    assert {"model_runner", "rank", "device"} <= found["vllm_ascend.worker.worker.NPUWorker"]
    assert not any("cumem" in name for name in found)


def test_its_weight_transfer_is_not_used() -> None:
    """At some commits the packed way of its IPC engine decodes weights and loads none of them."""
    for path in (contract.ASCEND, *contract.vllm.OURS.glob("[e-s]*.py")):
        words = {str(n.value) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        words |= {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        used = {"weight_transfer_config", "init_weight_transfer_engine", "update_weights", "npu_ipc"} & words
        assert not used, path.name


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("version", "beside", "reason"),
    [
        *(
            (
                version,
                version,
                f"vllm-ascend {version} is not supported: the vllm executor was held against 0.23.0 and "
                "0.26.0rc1 alone; pip install 'vllm-ascend==0.23.0' 'vllm==0.23.*'",
            )
            for version in ("0.22.1", "0.23.0.post1", "0.24.0", "0.25.1", "0.26.0")
        ),
        ("dev", "0.26.0", "vllm-ascend dev is not supported"),
        ("0.23.0", "0.26.0", "vllm-ascend 0.23.0 beside vLLM 0.26.0 is not supported: it is made for vLLM 0.23"),
    ],
)
def test_other_versions_are_refused(version: str, beside: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        ascend.check_versions(version, beside)


@pytest.mark.parametrize("pair", [("0.23.0", "0.23.0+empty"), ("0.26.0rc1", "0.26.1+empty")])
def test_pairs_are_accepted(pair: tuple[str, str]) -> None:
    ascend.check_versions(*pair)


def test_weights_in_the_vendors_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"vllm-ascend": "0.23.0"}[name])
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "1")
    with pytest.raises(InvalidInputError, match="VLLM_ASCEND_ENABLE_NZ=1 keeps weights in the vendor's order"):
        ascend.prepare("0.23.0")
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ")
    ascend.prepare("0.23.0")
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"


def spec(name: str) -> DeviceSpec:
    """As it is registered."""
    return registry().devices[name][0]


def test_without_an_npu_it_does_not_start() -> None:
    with pytest.raises(DeviceError, match="device 'npu' is not available here: torch_npu is not installed"):
        rlcore.InferenceEngine("nowhere", executor="vllm").build(devices="npu:0")


def test_on_a_simulated_device_it_does_not_start_unless_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(name="Ascend910B1 (simulated CANN)")
    device = SimpleNamespace(evidence="simulated", spec=spec("npu"), name="npu:0", properties=lambda: names)
    monkeypatch.setattr(ascend, "is_installed", lambda: True)
    with pytest.raises(UnsupportedError, match=r"vllm executor on npu:0, Ascend910B1 \(simulated CANN\).*SIMULATED=1"):
        ascend.check_device(device)
    monkeypatch.setenv("RLCORE_SIMULATED", "1")
    ascend.check_device(device)
    monkeypatch.delenv("RLCORE_SIMULATED")
    device.evidence = "declared"
    ascend.check_device(device)


def test_an_npu_and_vllm_ascend_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    npu, cpu = (SimpleNamespace(evidence="declared", spec=spec(name), name=f"{name}:0") for name in ("npu", "cpu"))
    assert (npu.spec.vllm_plugin, cpu.spec.vllm_plugin) == ("vllm-ascend", None)
    ascend.check_device(cpu)
    words = rf"on npu:0.*{re.escape(sys.executable)} has no vllm-ascend.*'vllm-ascend==0\.23\.0' 'vllm==0\.23\.\*'"
    with pytest.raises(UnsupportedError, match=words):
        ascend.check_device(npu)
    monkeypatch.setattr(ascend, "is_installed", lambda: True)
    ascend.check_device(npu)
    with pytest.raises(UnsupportedError, match=r"on cpu:0.* has vllm-ascend, by which vLLM runs on NPUs only"):
        ascend.check_device(cpu)


def test_the_worker_asks_about_its_device_before_anything_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(VllmExecutor, "device", SimpleNamespace(evidence="simulated", name="npu:0",
                        properties=lambda: SimpleNamespace(name="a stand-in")), raising=False)  # fmt: skip
    with pytest.raises(UnsupportedError, match="on npu:0, a stand-in"):
        VllmExecutor.build(object.__new__(VllmExecutor), tmp_path)


# ----------------------------------------------------------------------------------------------------- where it differs


def test_its_allocations_learn_whether_they_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    class AllocationData(SimpleNamespace):
        """As the wheel's dataclass, which has a handle and a tag."""

    calls: list[Any] = []
    allocator = SimpleNamespace(
        pointer_to_data={
            4096: AllocationData(handle=(0, 64, 4096, 7), tag="weights"),
            8192: AllocationData(handle=(0, 32, 8192, 8), tag="kv_cache"),
        }
    )
    camem = SimpleNamespace(
        CaMemAllocator=SimpleNamespace(get_instance=lambda: allocator),
        create_and_map=lambda handle: calls.append(("map", handle)),
        unmap_and_release=lambda handle: calls.append(("unmap", handle)),
    )
    for name in ("vllm_ascend", "vllm_ascend.device_allocator", "vllm_ascend.device_allocator.camem"):
        monkeypatch.setitem(sys.modules, name, camem)
    monkeypatch.setattr(ascend, "is_installed", lambda: True)
    device = SimpleNamespace(torch_device="npu:0")

    def found() -> list[regions.MappedAllocation]:
        return [regions.MappedAllocation(allocation, device) for allocation in ascend.allocations("weights")]

    (region,) = found()
    assert (region.nbytes(), region.address) == (64, 4096)
    region.resize_(0)
    region.resize_(0)
    assert [one.nbytes() for one in found()] == [0]
    region.resize_(64)
    assert [one.nbytes() for one in found()] == [64]
    assert calls == [("unmap", (0, 64, 4096, 7)), ("map", (0, 64, 4096, 7))]


def test_a_replica_sees_its_own_devices_where_numbers_have_to_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    """npu:1 cannot be put before npu:0; and an NPU's memory is opened on that NPU only, so the others are no loss."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,5,6")
    device = SimpleNamespace(index=0, count=lambda: 3)
    monkeypatch.setattr(process, "get_device", lambda name: SimpleNamespace(index=int(name[-1]), count=device.count))
    assert process.in_front(("npu:1", "npu:2")) == ("npu:0", {"ASCEND_RT_VISIBLE_DEVICES": "5,6"})
    with pytest.raises(InvalidInputError, match=r"takes rising numbers, and these indices give \['6', '5'\]"):
        process.in_front(("npu:2", "npu:1"))
