"""The device platform of verl over a device of rlcore: VERL_PLATFORM=rlcore, with RLCORE_DEVICE to name the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from rlcore.device import Device
from rlcore.registry import device_info, get_device, launch
from rlcore.settings import named_device
from rlcore.types import DeviceSpec


@PlatformRegistry.register(platform="rlcore")
class RlcorePlatform(PlatformBase):  # type: ignore[misc]
    """A platform that answers by the device that ``RLCORE_DEVICE`` names, or by the default one.

    A process without devices, such as Ray's driver, takes the default for the CPU: name the device there, too.
    """

    @property
    def device_name(self) -> str:
        return self._spec.torch_type

    @property
    def vendor_name(self) -> str:
        return self._spec.vendor.lower()

    @property
    def device_module(self) -> ModuleType:
        module: ModuleType = torch.get_device_module(self.device_name)
        return module

    def is_available(self) -> bool:
        return device_info(self._spec.name).is_available

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return True where verl may choose this platform unasked: never the CPU, which every machine has."""
        return self.is_available() and not self._spec.is_host

    def current_device(self) -> int:
        return 0 if self._spec.is_host else torch.accelerator.current_device_index()

    def device_count(self) -> int:
        return device_info(self._spec.name).count

    def set_device(self, device_index: int) -> None:
        self._device(device_index).activate()

    def synchronize(self, device_index: int | None = None) -> None:
        self._device(device_index).synchronize()

    def manual_seed(self, seed: int) -> None:
        self._device().seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._device(index).seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Say that it is not done: what torch offers for it is private, and differs between devices."""
        logging.getLogger(__name__).warning("allocator settings are left as they are, not %r", settings)

    def empty_cache(self) -> None:
        self._device().memory.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        found = getattr(self.device_module, "get_device_capability", lambda index: None)(device_index)
        return found if isinstance(found, tuple) else (None, None)  # XPU gives a dictionary

    def communication_backend_name(self) -> str:
        return self._spec.collective_backend

    def visible_devices_envvar(self) -> str:
        return self._spec.visible_devices_variable or ""  # verl asks the environment for it

    def ray_resource_name(self) -> str:
        """Return Ray's own name, or that of the device: start Ray with ``--resources='{"musa": 8}'``."""
        return self._spec.ray_resource or self._spec.name

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus} if self._spec.is_host else super().ray_resource_options(num_gpus)

    def ray_noset_envvars(self) -> list[str]:
        variable = self.visible_devices_envvar()
        return [f"RAY_EXPERIMENTAL_NOSET_{variable}"] if variable else []

    def is_ipc_supported(self) -> bool:
        return self._device().capabilities()["memory.export_ipc"].support != "unsupported"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        with self._device().profiler.range(msg):
            yield

    def profiler_start(self) -> None:
        """Do nothing: traces of rlcore need a path."""

    def profiler_stop(self) -> None:
        """Do nothing, as ``profiler_start``."""

    def cudart(self) -> Any:
        return getattr(self.device_module, "cudart", lambda: None)()

    @property
    def _spec(self) -> DeviceSpec:
        named = named_device()
        return launch(named).spec if named else get_device().spec

    def _device(self, index: int | None = None) -> Device:
        return get_device(f"{self._spec.name}:{self.current_device() if index is None else index}")
