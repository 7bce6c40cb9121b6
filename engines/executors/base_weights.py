"""The weights under adapters that checkpoints leave to the module's source, because it has the same bits.

Whether they were trained before they were frozen, or a method of the user's wrote them, does not matter: they are
compared, by sums of their bits, with what the source gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.collectives.default_group import all_gather_bytes
from rlcore.device import Device
from rlcore.engines.checkpoints.train_state import base_names
from rlcore.engines.weight_sync.planning.self_test import checksums

_PIECE = 1 << 22
"""The elements that are summed at once: a sum takes 8 bytes for each several times, while memory may be short."""


class BaseWeights:
    """The frozen weights under the adapters of a module, as its source gave them.

    Args:
        found: the parameters that the source has.
        part: returns what this rank holds of a parameter.
    """

    def __init__(
        self, module: nn.Module, found: Iterable[nn.Parameter], part: Callable[[nn.Parameter], Tensor]
    ) -> None:
        self._module, self._part = module, part
        known = {id(parameter) for parameter in found}
        names = base_names(module)
        self._sums = self._sums_of(name for name in names if id(module.get_parameter(name)) in known)

    def unchanged(self, device: Device) -> list[str]:
        """Return the names of those that are frozen still and have the same bits on each rank; all ranks call it."""
        names = [name for name in base_names(self._module) if name in self._sums]
        now = self._sums_of(names)
        same = [name for name in names if now[name] == self._sums[name]]
        if not names or not dist.is_initialized():
            return same
        everywhere = all_gather_bytes(msgspec.json.encode(same), device.torch_device)
        common = set(same).intersection(*(msgspec.json.decode(one, type=list[str]) for one in everywhere))
        return [name for name in same if name in common]

    def _sums_of(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Return sums of the bits of each weight, one for each piece."""
        pieces = [
            (name, piece)
            for name in names
            for piece in torch.split(self._part(self._module.get_parameter(name)).detach().reshape(-1), _PIECE)
        ]
        sums: dict[str, list[int]] = {}
        for (name, _), found in zip(pieces, checksums(piece for _, piece in pieces), strict=True):
            sums.setdefault(name, []).append(found)
        return sums
