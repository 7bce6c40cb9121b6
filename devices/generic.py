"""A device of any vendor that torch knows, over ``torch.accelerator`` and ``torch.get_device_module``.

``GenericTorchDevice`` can be the loader of a ``DeviceSpec``. A vendor whose hardware can do more replaces parts; a
member that a part does not have raises ``UnsupportedError``. No member silently does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from rlcore.arguments import Checked, Kind
from rlcore.device import Device
from rlcore.devices.collectives import TorchCollectives
from rlcore.devices.memory import TorchMemory
from rlcore.devices.profiler import TorchProfiler
from rlcore.devices.streams import TorchStreams
from rlcore.errors import InvalidInputError, UnsupportedError, first_line
from rlcore.launch import LaunchFacts
from rlcore.types import (
    Capability,
    DeviceProcess,
    DeviceProperties,
    DeviceSpec,
    DeviceStatus,
    Evidence,
    Probe,
    Simulation,
)

_SEED = Kind("a whole number of at most 64 bits", lambda value: type(value) is int and -(2**63) <= value < 2**64)
_STATE = Kind(
    "what rng_state() gave, a uint8 tensor in host memory",
    lambda value: isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.is_cpu,
)

_RANDOM = ("seed", "rng_state", "set_rng_state")


class GenericTorchDevice(Checked, Device):
    """A device of any vendor that torch knows; `rlcore.device.Device` documents its members."""

    memory_class: ClassVar[type[TorchMemory]] = TorchMemory
    streams_class: ClassVar[type[TorchStreams]] = TorchStreams
    collectives_class: ClassVar[type[TorchCollectives]] = TorchCollectives
    profiler_class: ClassVar[type[TorchProfiler]] = TorchProfiler
    accepts: ClassVar = {"seed": {"value": _SEED}, "set_rng_state": {"state": _STATE}}
    evidence: ClassVar[Evidence] = "hardware"

    def __init__(self, spec: DeviceSpec, index: int) -> None:
        self.spec = spec
        self.index = index
        self.memory = self.memory_class(self)
        self.streams = self.streams_class(self)
        self.collectives = self.collectives_class(self)
        self.profiler = self.profiler_class(self)
        self.launch = LaunchFacts(spec)

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        """Return the number of usable devices, or why there is none. It must not initialise a device."""
        if spec.torch_build and getattr(torch.version, spec.torch_build, None) is None:
            return Probe(0, f"torch {torch.__version__} is no build for it: torch.version.{spec.torch_build} is None")
        try:
            count = torch.get_device_module(spec.torch_type).device_count()
        except RuntimeError:
            return Probe(
                0,
                f"torch {torch.__version__} has no device type {spec.torch_type!r}; install the vendor's extension of "
                "torch, or a torch that is built for it",
            )
        found_none = "there is none, it is hidden, its driver is missing, or torch is not built for it"
        return Probe(count, "" if count else f"torch.{spec.torch_type} counts no device: {found_none}")

    @property
    def name(self) -> str:
        return f"{self.spec.name}:{self.index}"

    @property
    def vendor(self) -> str:
        return self.spec.vendor

    @property
    def type(self) -> str:
        return self.spec.torch_type

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type, self.index)

    def count(self) -> int:
        return self.probe(self.spec).count

    def limits(self) -> dict[str, Capability]:
        """Return the members of the device itself that are not native, by name, as the parts have theirs."""
        module = torch.get_device_module(self.type)
        needed = {"get_device_properties": ("properties",), "default_generators": _RANDOM}
        return {
            member: Capability("unsupported", self.evidence, f"{module.__name__} has no {function}")
            for function, members in needed.items()
            for member in members
            if not hasattr(module, function) and self._inherits(member)
        }

    def _inherits(self, member: str) -> bool:
        """Return True if no vendor's class has replaced the member, or the generator that it works on."""
        names = (member, "_generator") if member in _RANDOM else (member,)
        return all(getattr(type(self), name) is getattr(GenericTorchDevice, name) for name in names)

    def _check_is_supported(self, member: str) -> None:
        if (limit := self.limits().get(member)) is not None and limit.support == "unsupported":
            raise UnsupportedError(f"identity.{member} on {self.name}", limit.reason)

    def properties(self) -> DeviceProperties:
        self._check_is_supported("properties")
        found = self._module.get_device_properties(self.index)
        return DeviceProperties(
            name=str(getattr(found, "name", "")),
            uuid=str(getattr(found, "uuid", "")),
            total_bytes=self.memory.info().total_bytes,
            capability=".".join(str(getattr(found, part)) for part in ("major", "minor") if hasattr(found, part)),
            cores=int(getattr(found, "multi_processor_count", 0)),
        )

    def simulation(self) -> Simulation | None:
        return None

    def versions(self) -> dict[str, str]:
        return {}

    def driver_version(self) -> str:
        raise UnsupportedError(f"driver_version of {self.name}", "its plugin does not ask the driver")

    def telemetry(self) -> DeviceStatus:
        raise UnsupportedError(f"telemetry of {self.name}", "its plugin does not ask the driver")

    def processes(self) -> Sequence[DeviceProcess]:
        raise UnsupportedError(f"processes of {self.name}", "its plugin does not ask the driver")

    def activate(self) -> None:
        torch.accelerator.set_device_index(self.index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def seed(self, value: int) -> None:
        self._check_is_supported("seed")
        self._generator().manual_seed(value)

    def rng_state(self) -> torch.Tensor:
        self._check_is_supported("rng_state")
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._check_is_supported("set_rng_state")
        try:
            self._generator().set_state(state)
        except RuntimeError as error:
            raise InvalidInputError(
                f"set_rng_state of {self.name} takes what rng_state() of a {self.spec.name} device gave: "
                f"{first_line(error)}"
            ) from error

    def capabilities(self) -> dict[str, Capability]:
        parts = (self.memory, self.streams, self.collectives, self.profiler)
        own = {f"identity.{member}": how for member, how in self.limits().items()}
        return own | {member: how for part in parts for member, how in part.capabilities().items()}

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.torch_device)

    def _generator(self) -> torch.Generator:
        module = self._module
        if not module.default_generators:  # those of ROCm and XPU are there once the back end is initialised
            module.init()
        generator: torch.Generator = module.default_generators[self.index]
        return generator

    def __repr__(self) -> str:
        return f"<{self.vendor} device {self.name}>"
