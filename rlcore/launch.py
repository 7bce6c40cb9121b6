"""Facts for launching processes on a kind of device: string work only, on a machine that may have no such device.

A vendor's variable (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES, ...) names devices by their number on the
machine or by uuid, and so renumbers them: under "4,6" the process knows two devices, 0 and 1. Its children inherit
the variable, and their numbers count what it names. ``rlcore.registry.launch("cuda")`` gives the facts of a kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlcore.arguments import LIST, Checked, kind_of
from rlcore.errors import DeviceError, InvalidInputError
from rlcore.types import DeviceSpec

_ENVIRON = kind_of("a mapping such as os.environ", Mapping)
# A number, a tile of one ("0.1"), or a uuid after its kind ("GPU-8932f937", "MIG-GPU-8932f937/1/0").
_ID = re.compile(r"\d+(\.\d+)?|[A-Z]+-[\w/-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class LaunchFacts(Checked):
    """Facts for starting processes that use devices of one kind. ``environ`` is ``os.environ`` where it is left out."""

    accepts: ClassVar = {
        "visible_devices": {"environ": _ENVIRON},
        "physical_id": {"environ": _ENVIRON},
        "worker_environment": {"indices": LIST, "environ": _ENVIRON},
        "visible_uuids": {"uuids": LIST, "environ": _ENVIRON},
    }
    spec: DeviceSpec

    @property
    def visible_devices_variable(self) -> str | None:
        """Return the environment variable that restricts which devices a process sees; None where there is none."""
        return self.spec.visible_devices_variable

    @property
    def ray_resource(self) -> str | None:
        """Return the resource name by which Ray schedules such a device."""
        return self.spec.ray_resource

    def visible_devices(self, environ: Mapping[str, str] = os.environ) -> list[str] | None:
        """Return the ids in the variable, in the order of their indices; None when all devices are visible.

        They are read as by the vendors' drivers: the first entry that is no id ("-1", "NoDevFiles", nothing) ends the
        list, and a repeated id leaves no device at all. Where ids must rise, the first that does not ends the list.
        """
        variable = self.visible_devices_variable
        if variable is None or variable not in environ:
            return None
        found: list[str] = []
        for entry in map(str.strip, environ[variable].split(",")):
            if not _ID.fullmatch(entry) or self._falls(found, entry):
                break
            if entry in found:
                return []
            found.append(entry)
        return found

    def physical_id(self, index: int, environ: Mapping[str, str] = os.environ) -> str:
        """Return the id by which the variable names the device that has ``index`` in this environment.

        Raises:
            DeviceError: the variable names fewer devices.
        """
        if type(index) is not int or index < 0:
            raise InvalidInputError(f"the index of a device is a whole number of at least 0, got {index!r}")
        visible = self.visible_devices(environ)
        if visible is None:
            return str(index)
        if index >= len(visible):
            raise DeviceError(
                f"device '{self.spec.name}:{index}' is not visible: {self.visible_devices_variable} names "
                f"{len(visible)} of them, {visible}; change it before the process starts"
            )
        return visible[index]

    def worker_environment(self, indices: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables for a process that sees only these devices of this environment, as 0, 1, ...

        Under CUDA_VISIBLE_DEVICES=4,6 the device 1 is {"CUDA_VISIBLE_DEVICES": "6"}. No index hides all of them.
        Empty where the vendor has no variable: such a process sees every device, under the same numbers.

        Raises:
            InvalidInputError: an index is repeated or is no index; or the ids do not rise where they must.
            DeviceError: an index that is not visible.
        """
        ids = [self.physical_id(index, environ) for index in indices]
        if len(set(indices)) != len(indices):
            raise InvalidInputError(f"a process sees each device once; these indices repeat: {list(indices)}")
        variable = self.visible_devices_variable
        for place, entry in enumerate(ids):
            if self._falls(ids[:place], entry):
                raise InvalidInputError(
                    f"{variable} takes rising numbers, and these indices give {ids}; name them in rising order"
                )
        return {} if variable is None else {variable: ",".join(ids)}

    def _falls(self, before: Sequence[str], entry: str) -> bool:
        if not self.spec.visible_devices_rise:
            return False
        return not entry.isdecimal() or (bool(before) and int(entry) <= int(before[-1]))

    def visible_uuids(self, uuids: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
        """Return the uuids of the visible devices by index; ``uuids`` are those of the whole machine by number.

        The place of a uuid in the result is its index in a process with this environment, whatever index the same
        device has in another. A number or uuid that the machine does not have ends the list.
        """
        visible = self.visible_devices(environ)
        if visible is None:
            return list(uuids)
        found: list[str] = []
        for entry in visible:
            matching = _matching(entry, uuids)
            if len(matching) != 1:
                break
            found += matching
        return found if len(set(found)) == len(found) else []


def _matching(entry: str, uuids: Sequence[str]) -> list[str]:
    """Return the uuids that an id can mean: vendors accept the beginning of a uuid."""
    if entry.isdecimal():
        return list(uuids[int(entry) : int(entry) + 1])
    return [uuid for uuid in uuids if _bare(uuid).startswith(_bare(entry))]


def _bare(uuid: str) -> str:
    """Return a uuid without the "GPU-" that tools print before it."""
    return uuid.removeprefix("GPU-").lower()
