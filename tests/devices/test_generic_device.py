"""A device by its spec alone, over torch's own modules of back ends that this machine does not have.

``torch.xpu``, ``torch.mps`` and ``torch.cuda`` are those of the installed torch; only what they would do once a device
is there is put in their place.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.devices.generic import GenericTorchDevice
from rlcore.errors import UnsupportedError
from rlcore.types import DeviceSpec

NO_ALLOCATOR = "Allocator for mps is not a DeviceAllocator."  # torch 2.10 on Apple silicon, behind an INTERNAL ASSERT
NO_INFO = "getMemoryInfo is not implemented for this allocator yet."


def device_of(torch_type: str, index: int = 0) -> GenericTorchDevice:
    spec = DeviceSpec(
        name=torch_type, vendor="A vendor", torch_type=torch_type, priority=1, api_version=(1, 0),
        loader="rlcore.devices.generic:GenericTorchDevice", collective_backend="gloo",
    )  # fmt: skip
    return GenericTorchDevice(spec, index)


def raising(error: Exception) -> Any:
    def function(*_: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize("torch_type", ["xpu", "cuda"])
def test_the_first_random_number_initialises_the_back_end(torch_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = torch.get_device_module(torch_type)
    monkeypatch.setattr(module, "default_generators", ())  # as it is before init, on a machine with devices too
    made = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(module, "init", lambda: setattr(module, "default_generators", made))
    device = device_of(torch_type, 1)
    device.seed(7)
    assert (made[0].initial_seed() == 7, made[1].initial_seed() == 7) == (False, True)
    assert torch.equal(device.rng_state(), made[1].get_state())


def test_functions_that_the_module_lacks_are_unsupported_and_capabilities_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = device_of("mps")
    for function in ("memory_stats", "reset_peak_memory_stats", "empty_cache", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, function, raising(RuntimeError(NO_ALLOCATOR)))
    uses = {
        "identity.properties": (device.properties, "torch.mps has no get_device_properties"),
        "identity.seed": (lambda: device.seed(1), "torch.mps has no default_generators"),
        "identity.rng_state": (device.rng_state, "torch.mps has no default_generators"),
        "memory.info": (device.memory.info, NO_ALLOCATOR),
        "memory.stats": (device.memory.stats, NO_ALLOCATOR),
        "memory.reset_peak": (device.memory.reset_peak, NO_ALLOCATOR),
        "memory.empty_cache": (device.memory.empty_cache, NO_ALLOCATOR),
    }
    said = device.capabilities()
    for member, (use, reason) in uses.items():
        with pytest.raises(UnsupportedError, match=f"{member} on mps:0 is not supported: ") as refused:
            use()
        assert refused.value.reason == said[member].reason
        assert reason in refused.value.reason
        assert said[member].support == "unsupported"


def test_memory_is_asked_of_torch_accelerator_where_the_module_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of("mps")
    stats = {"allocated_bytes.all.current": 3, "allocated_bytes.all.peak": 5, "reserved_bytes.all.current": 8}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda of: stats if of == device.torch_device else {})
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda of: (2, 9) if of == device.torch_device else None)
    found, info = device.memory.stats(), device.memory.info()
    assert (found.allocated_bytes, found.peak_allocated_bytes, found.reserved_bytes) == (3, 5, 8)
    assert (info.free_bytes, info.total_bytes) == (2, 9)
    assert device.capabilities()["memory.info"].support == "native"
    monkeypatch.setattr(torch.accelerator, "get_memory_info", raising(NotImplementedError(NO_INFO)))
    with pytest.raises(UnsupportedError, match="getMemoryInfo is not implemented"):
        device.memory.info()
    assert device.capabilities()["memory.info"].support == "unsupported"  # which nothing but the call could tell


def test_a_failure_of_the_device_is_no_lack_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "memory_stats", raising(RuntimeError("the device was lost")))
    device = device_of("mps")
    with pytest.raises(RuntimeError, match=r"^the device was lost$"):
        device.memory.stats()
    assert device.capabilities()["memory.stats"].support == "native"


# ------------------------------------------------------------------------------------- torch's own Python surface

CALLED = ("device_count", "init", "is_initialized", "default_generators", "get_device_properties", "mem_get_info")
EVENTS = {"streams.export_event", "streams.import_event"}
IPC = {"memory.export_ipc", "memory.import_ipc", "memory.revoke", "memory.ledger"}
OF_MPS = {"memory.pool", "identity.properties", "identity.seed", "identity.rng_state", "identity.set_rng_state"}


@pytest.mark.parametrize(("torch_type", "lacking"), [("cuda", set()), ("xpu", set()), ("mps", OF_MPS)])
def test_what_a_spec_alone_lacks_follows_from_torch(torch_type: str, lacking: set[str]) -> None:
    """By "cuda" for ROCm too, whose build has the same Python modules."""
    found = {member for member, how in device_of(torch_type).capabilities().items() if how.support == "unsupported"}
    has_no_pool = {"memory.pool"} - lacking  # not every supported torch has pools of XPU
    assert found - has_no_pool == (EVENTS | IPC | lacking) - has_no_pool


@pytest.mark.parametrize(
    ("torch_type", "functions"),
    [("cuda", CALLED), ("xpu", CALLED), ("mps", ("device_count",))],
)
def test_torchs_modules_have_what_is_called_on_them(torch_type: str, functions: tuple[str, ...]) -> None:
    module = torch.get_device_module(torch_type)
    assert [name for name in functions if not hasattr(module, name)] == []


@pytest.mark.parametrize(
    ("properties", "has"),
    [
        ("_CudaDeviceProperties", {"name", "uuid", "major", "minor", "multi_processor_count"}),
        ("_XpuDeviceProperties", {"name", "uuid"}),
    ],
)
def test_the_properties_that_are_read_are_those_that_torch_declares(properties: str, has: set[str]) -> None:
    """The classes are in builds for these devices alone; their declaration is in every torch."""
    declared = ast.parse((Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text())
    (found,) = [node for node in declared.body if isinstance(node, ast.ClassDef) and node.name == properties]
    fields = {ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}
    assert fields & {"name", "uuid", "major", "minor", "multi_processor_count"} == has
