"""What is known of NPUs where there is none: launch facts, versions, why there is none, and what the doctor says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import rlcore
from rlcore.devices.ascend import device as ascend_device
from rlcore.devices.ascend import memory, sharing, simulation, versions
from rlcore.devices.ascend.device import AscendDevice
from rlcore.devices.ascend.sharing import AscendSharing, why_no_ipc
from rlcore.devices.ascend.versions import CANN_FOR_IPC, DRIVER_FOR_IPC, Version, cann, driver
from rlcore.devices.ipc.sharing import SharedMemory
from rlcore.doctor import ascend
from rlcore.errors import DeviceError, InvalidInputError
from rlcore.registry import launch, registry
from rlcore.types import Simulation

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
NPU = {"torch-npu": "2.13.0"}


# ------------------------------------------------------------------------------------------------ launch


def test_ray_schedules_it_as_npu() -> None:
    assert launch("npu").ray_resource == "NPU"


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("4,6", ["4", "6"]),
        ("1,0", ["1"]),  # a falling number ends the list
        ("3,3", ["3"]),
        ("2,x,5", ["2"]),
        ("NPU-12,1", []),  # it knows no uuids
    ],
)
def test_visible_devices_rise(value: str, visible: list[str]) -> None:
    assert launch("npu").visible_devices({VARIABLE: value}) == visible


def test_a_worker_sees_its_devices_under_the_numbers_of_the_machine() -> None:
    assert launch("npu").worker_environment([0, 1], {VARIABLE: "4,6"}) == {VARIABLE: "4,6"}
    assert launch("npu").worker_environment([1], {VARIABLE: "4,6"}) == {VARIABLE: "6"}


def test_devices_in_falling_order_cannot_be_given_to_a_worker() -> None:
    with pytest.raises(
        InvalidInputError, match=rf"{VARIABLE} takes rising numbers, and these indices give \['6', '4'\]"
    ):
        launch("npu").worker_environment([1, 0], {VARIABLE: "4,6"})
    assert launch("cuda").worker_environment([1, 0], {}) == {"CUDA_VISIBLE_DEVICES": "1,0"}


# ------------------------------------------------------------------------------------------------ discovery


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_the_reason_says_what_to_install() -> None:
    (npu,) = [info for info in rlcore.list_devices() if info.name == "npu"]
    assert npu.count == 0
    assert "torch_npu is not installed: pip install 'torch-npu==" in npu.reason


@pytest.mark.slow
def test_a_wheel_that_was_not_loaded_is_told(run_python: Any, tmp_path: Path) -> None:
    _install(tmp_path, "")
    found = _devices(run_python, PYTHONPATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "torch_npu 2.13.0 is installed, but was not loaded with torch: unset TORCH_DEVICE" in found["npu"][1]


@pytest.mark.slow
def test_a_wheel_without_cann_does_not_take_discovery_down(run_python: Any, tmp_path: Path) -> None:
    _install(tmp_path, "raise ImportError('libhccl.so: cannot open shared object file')")
    found = _devices(run_python, PYTHONPATH=str(tmp_path))
    assert set(found) >= {"cpu", "cuda", "npu"}
    for count, reason in found.values():
        assert (count, "Failed to load the backend extension: torch_npu" in reason) == (0, True)
        assert "(ImportError: libhccl.so: cannot open shared object file); `rlcore doctor` says what to do" in reason


@pytest.mark.slow
def test_commands_say_in_one_line_that_torch_cannot_be_imported(run_python: Any, tmp_path: Path) -> None:
    _install(tmp_path, "raise ImportError('libhccl.so: cannot open shared object file')")
    result = run_python(["-m", "rlcore", "quickstart", "--device", "npu"], env={"PYTHONPATH": str(tmp_path)})
    (line,) = result.stderr.splitlines()
    assert (result.returncode, line.startswith("rlcore: import torch failed: RuntimeError: Failed to load")) == (
        1,
        True,
    )
    assert line.endswith("(ImportError: libhccl.so: cannot open shared object file); `rlcore doctor` says what to do")


def _devices(run_python: Any, **env: str) -> dict[str, Any]:
    code = "import json, rlcore; print(json.dumps({i.name: [i.count, i.reason] for i in rlcore.list_devices()}))"
    result = run_python(code, env=env)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def _install(folder: Path, code: str) -> None:
    """A torch_npu as its wheel is found: by its metadata, and by torch's autoload."""
    package, info = folder / "torch_npu", folder / "torch_npu-2.13.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(f"{code}\ndef _autoload(): pass\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


# ------------------------------------------------------------------------------------------------ uuids

TOLD = "43414e4e-2d53-494d-0000-000000000001"


@pytest.fixture
def npus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NPUs of which torch_npu says what ``told`` has, by index; their numbers are those of ``visible``."""

    def make(told: list[Any], visible: str | None = None) -> list[AscendDevice]:
        monkeypatch.delenv(VARIABLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(VARIABLE, visible)
        module = SimpleNamespace(
            get_device_properties=lambda index: SimpleNamespace(name="Ascend910B1", **told[index]),
            mem_get_info=lambda index: (1, 1),
        )
        for place in (ascend_device, memory):
            monkeypatch.setattr(place, "npu", lambda: module)
        spec, _ = registry().devices["npu"]
        return [AscendDevice(spec, index) for index in range(len(told))]

    return make


@pytest.mark.parametrize("told", [{"uuid": str(uuid.UUID(int=0))}, {"uuid": ""}, {}], ids=["nil", "empty", "none"])
def test_a_uuid_that_is_not_told_is_made_for_each_npu(npus: Any, told: dict[str, str]) -> None:
    first, second = (npu.properties().uuid for npu in npus([told, told]))
    assert first != second
    assert uuid.UUID(first) and uuid.UUID(second)
    assert [npu.properties().uuid for npu in npus([told, told])] == [first, second]
    assert [npu.properties().uuid for npu in npus([told, told], visible="0,1")] == [first, second]
    (alone,) = npus([told], visible="1")
    assert alone.properties().uuid == second, "the same NPU under another number"


def test_a_uuid_that_is_told_is_taken(npus: Any) -> None:
    told, made = npus([{"uuid": TOLD}, {}])
    assert told.properties().uuid == TOLD != made.properties().uuid


def test_memory_of_another_npu_is_refused_where_no_uuid_is_told(npus: Any) -> None:
    nil = {"uuid": str(uuid.UUID(int=0))}
    first, second = npus([nil, nil])
    name = sharing._NpuPayload(second.properties().uuid, b"key", 64, 0, b"", False)
    with pytest.raises(DeviceError, match=rf"this memory is of the NPU {second.properties().uuid}; npu:0 is "):
        AscendSharing(first).open(SharedMemory(payload=msgspec.msgpack.encode(name)), 64)


# ------------------------------------------------------------------------------------------------ versions


def test_versions_are_ordered_with_candidates_before_releases() -> None:
    texts = ["8.0.0", "8.3.RC1", "8.3.RC2", "8.3.0", "8.5.0", "25.2.0", "25.3.rc1", "25.3.0"]
    assert [str(version) for version in sorted(map(Version, reversed(texts)))] == texts
    assert Version("8.3.RC1") == Version("8.3.rc1") == CANN_FOR_IPC
    assert Version("25.3.rc1") == DRIVER_FOR_IPC


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.5.0\n", "8.5.0"),
        ("ascend_toolkit_install.info", "version=8.3.RC1\n", "8.3.RC1"),
        ("version.cfg", "# version: 1.0\nversion=[8.5.0:8.5.0]\n", "8.5.0"),
        ("opp/version.info", "Version=9.0.0\n", "9.0.0"),
        ("ascend_toolkit_install.info", "version=8.5.0-simulated\n", "8.5.0-simulated"),
    ],
)
def test_cann_tells_its_version_in_one_of_its_files(tmp_path: Path, file: str, text: str, version: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    found = cann({"ASCEND_HOME_PATH": str(tmp_path)})
    assert (found, str(found)) == (Version(version), version)
    assert cann({}) is None


def test_the_driver_tells_its_version(tmp_path: Path) -> None:
    path = tmp_path / "version.info"
    assert driver(path) is None
    path.write_text("Version=25.3.rc1\nascendhal_version=7.35.23\n")
    assert driver(path) == DRIVER_FOR_IPC


def test_a_report_has_the_versions_below_torch(npus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"torch-npu": "2.13.0"}.__getitem__)
    for name, found in (("cann", Version("8.5.0")), ("driver", None)):
        monkeypatch.setattr(versions, name, lambda found=found: found)
    (npu,) = npus([{}])
    assert npu.versions() == {"torch-npu": "2.13.0", "CANN": "8.5.0"}, "what does not tell is left out"
    monkeypatch.setattr(versions, "driver", lambda: DRIVER_FOR_IPC)
    assert npu.versions()["driver"] == "25.3.rc1"


# ------------------------------------------------------------------------------------------------ doctor


def _cann(folder: Path, version: str) -> dict[str, str]:
    for name in ("runtime", "compiler"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "ascend_toolkit_install.info").write_text(f"version={version}\n")
    return {"ASCEND_HOME_PATH": str(folder), "ASCEND_OPP_PATH": str(folder)}


def test_the_doctor_asks_for_cann_where_torch_npu_is(tmp_path: Path) -> None:
    assert ascend.cann({}, {}).status == "OK"
    missing = ascend.cann(NPU, {})
    assert (missing.status, "import torch fails" in missing.found) == ("FAIL", True)
    assert "set_env.sh" in missing.fix and "pip uninstall torch-npu" in missing.fix
    environ = _cann(tmp_path, "8.5.0")
    assert ascend.cann(NPU, environ).found.startswith("CANN 8.5.0; ")
    old = ascend.cann(NPU, _cann(tmp_path, "8.2.RC1"))
    assert (old.status, "CANN 8.2.RC1" in old.found, "from 8.3.RC1 on" in old.found) == ("WARN", True, True)
    (tmp_path / "compiler").rmdir()
    assert f"{tmp_path} lacks compiler, which torch-npu asks for" in ascend.cann(NPU, environ).found
    assert "lacks compiler, ASCEND_OPP_PATH" in ascend.cann(NPU, {"ASCEND_HOME_PATH": str(tmp_path)}).found


def test_the_doctor_asks_for_the_driver_where_torch_npu_is(tmp_path: Path) -> None:
    path = tmp_path / "version.info"
    assert ascend.driver({}, path).status == "OK"
    assert ascend.driver(NPU, path).status == "WARN"
    path.write_text("Version=25.2.0\n")
    assert ascend.driver(NPU, path).found.startswith("driver 25.2.0: processes share NPU memory from 25.3.rc1 on")
    path.write_text("Version=25.5.0\n")
    assert ascend.driver(NPU, path) == ascend.ok("driver 25.5.0")


# ------------------------------------------------------------------------------------------------ simulation


def test_a_variable_makes_no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded library that does not name itself is CANN; here the C library stands where CANN is."""
    monkeypatch.setenv("RLCORE_SIMULATED", "1")
    for library in ("libascendcl.so", "libc.so.6"):  # not loaded, and loaded
        simulation._asked.cache_clear()
        monkeypatch.setattr(simulation, "_LIBRARY", library)
        assert (simulation.name(), simulation.found()) == ("", None)


def test_what_a_stand_in_says_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("operator aten::add\nrefused npu::x\noperator aten::add\noperator HcclSend\nrefused HCCL of u8\n")
    told = {"rlcore_simulation": "simulated X", "rlcore_simulation_log": str(log)}
    monkeypatch.setattr(simulation, "_asked", told.get)
    found = simulation.found()
    assert found == Simulation("simulated X", ("HcclSend", "aten::add"), ("HCCL of u8", "npu::x"))
    assert str(found) == "simulated X: 2 operators simulated, refused: HCCL of u8, npu::x"


# ------------------------------------------------------------------------------------------------ sharing


def test_a_torch_npu_without_ipc_says_so() -> None:
    """As torch here, which has no torch_npu at all: those of the 7.1.0 releases and before have no ``_share_npu_``."""
    assert why_no_ipc() == "this torch_npu has no IPC of tensors, which came with its 7.2.0 releases"


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"cann": "8.2.RC1"}, "IPC needs CANN 8.3.RC1 or newer, this is 8.2.RC1"),
        ({"driver": "25.2.0"}, "IPC needs the driver 25.3.rc1 or newer, this is 25.2.0"),
        ({"cann": "8.5.0", "driver": "25.5.0"}, ""),
    ],
)
def test_ipc_has_a_floor(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], reason: str) -> None:
    monkeypatch.setattr(torch.TypedStorage, "_share_npu_", None, raising=False)
    for name in ("cann", "driver"):
        version = Version(installed[name]) if name in installed else None
        monkeypatch.setattr(sharing, name, lambda version=version: version)
    assert why_no_ipc() == reason


def test_a_handle_of_something_else_is_refused() -> None:
    with pytest.raises(DeviceError, match="bytes are no payload of an NPU's memory"):
        sharing._decoded(b"\x00" * 72)
