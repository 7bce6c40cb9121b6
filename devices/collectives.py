"""The collective library of a device over torch.distributed: its capabilities, and its process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from rlcore.device import DEFAULT_COLLECTIVE_TIMEOUT_S, Collectives, GroupArguments
from rlcore.devices._torch_private import backend_request, gloo_options, registered_backend, set_timeout
from rlcore.devices.native_reductions import BITWISE_OPS, BY_LIBRARY, MINIMUM
from rlcore.devices.part import TorchPart
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.tensor_data import dtype_name
from rlcore.types import Capability

if TYPE_CHECKING:
    from rlcore._torch_private import Backend, ProcessGroup, Store

REDUCE_OPS = ("sum", "avg", "product", "min", "max", *BITWISE_OPS, "premul_sum")
"""torch's ``ReduceOp``, in lower case."""

REDUCIBLE_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex128, torch.complex64),
)
"""The dtypes that can be reduced; tensors of any dtype can be moved as bytes."""

_LONGEST_S = 365 * 86400.0  # libraries count milliseconds or nanoseconds in 64 bits


class TorchCollectives(TorchPart, Collectives):
    """Collectives through the torch.distributed back end of the device's registration.

    The library itself reduces ``native_dtypes`` by ``native_ops``, except the pairs in ``not_native``, on every
    supported torch; a library that ``devices/native_reductions.py`` knows by name needs no more than its name.
    ``rlcore.collectives.groups`` emulates the other defined reductions: the library moves bytes, and each rank reduces
    its part.
    """

    name: ClassVar = "collectives"
    members: ClassVar = ("backend", "init_kwargs", "reduce_ops", "dtypes")

    @property
    def native_ops(self) -> frozenset[str]:
        return BY_LIBRARY.get(self.backend, MINIMUM).ops

    @property
    def native_dtypes(self) -> frozenset[torch.dtype]:
        return BY_LIBRARY.get(self.backend, MINIMUM).dtypes

    @property
    def not_native(self) -> frozenset[tuple[str, torch.dtype]]:
        return BY_LIBRARY.get(self.backend, MINIMUM).but_not

    @property
    def backend(self) -> str:
        return self._device.spec.collective_backend

    def init_kwargs(
        self, *, timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S, is_high_priority: bool = False
    ) -> GroupArguments:
        arguments: GroupArguments = {"backend": self.backend, "timeout": _timeout(timeout_s)}
        if (options := self._options(timeout_s, is_high_priority)) is not None:
            arguments["pg_options"] = options
        if not self._is_on_host:
            arguments["backend"] = f"cpu:gloo,{self._device.type}:{self.backend}"
            arguments["device_id"] = self._device.torch_device
        return arguments

    def reduce_ops(self) -> dict[str, Capability]:
        return {op: self.reduction(op, torch.int32 if op in BITWISE_OPS else torch.float32) for op in REDUCE_OPS}

    def dtypes(self) -> dict[torch.dtype, Capability]:
        return {dtype: self.reduction("sum", dtype) for dtype in REDUCIBLE_DTYPES}

    def reduction(self, op: str, dtype: torch.dtype) -> Capability:
        if not isinstance(dtype, torch.dtype):
            raise InvalidInputError(f"a dtype is one of torch's, such as torch.bfloat16; got {dtype!r}")
        if op not in REDUCE_OPS:
            raise InvalidInputError(f"the reduce operator must be one of {', '.join(REDUCE_OPS)}; got {op!r}")
        if reason := _why_undefined(op, dtype):
            return Capability("unsupported", self._device.evidence, reason)
        if op not in self.native_ops:
            return Capability("emulated", self._device.evidence, f"{self.backend} has no {op}")
        is_mean_of_whole = op == "avg" and not dtype.is_floating_point
        if dtype not in self.native_dtypes or is_mean_of_whole or (op, dtype) in self.not_native:
            return Capability("emulated", self._device.evidence, f"{self.backend} has no {op} of {dtype_name(dtype)}")
        if op in ("min", "max") and dtype.is_floating_point:
            return Capability("emulated", self._device.evidence, f"{op} of {self.backend} can lose NaN")
        return Capability("native", self._device.evidence)

    def new_backend(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_high_priority: bool = False,
        is_one_host: bool = False,
        name: str = "",
    ) -> Backend | ProcessGroup:
        options = self._options(timeout_s, is_high_priority)
        made: Backend | ProcessGroup
        if (plugin := registered_backend(self.backend)) is not None:
            made = _from_plugin(plugin, store, rank=rank, world_size=world_size, timeout_s=timeout_s, name=name)
        elif self.backend == "gloo":
            made = _gloo(store, rank, world_size, timeout_s, is_one_host)
        else:
            options.global_ranks_in_group = list(range(world_size))
            options.group_name = name
            made = self._built_in()(store, rank, world_size, options)
        return made

    def _options(self, timeout_s: float, is_high_priority: bool) -> Any:
        """Return the library's options; None if no options are known for it."""
        if self.backend == "gloo" or registered_backend(self.backend) is not None:
            if is_high_priority:
                raise UnsupportedError(
                    f"a high-priority stream of collectives on {self._device.name}",
                    f"no such option is known of {self.backend}",
                )
            return None
        options = self._built_in().Options()
        set_timeout(options, _timeout(timeout_s))
        options.is_high_priority_stream = is_high_priority
        return options

    def _built_in(self) -> Any:
        """Return the class of a library that is part of the torch build: NCCL, RCCL and XCCL share one interface."""
        library = getattr(dist, f"ProcessGroup{self.backend.upper()}", None)
        if library is None:
            raise UnsupportedError(
                f"the torch.distributed back end {self.backend!r} of {self._device.name}",
                f"torch {torch.__version__} was built without it, and nothing has registered it",
            )
        return library

    @property
    def _is_on_host(self) -> bool:
        return self._device.type == "cpu"


def _timeout(timeout_s: float) -> timedelta:
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s <= _LONGEST_S):
        raise InvalidInputError(
            f"timeout_s must be more than 0 seconds, got {timeout_s!r}; at most {_LONGEST_S:.0f} (a year)"
        )
    return timedelta(seconds=timeout_s)


def _gloo(store: Store, rank: int, world_size: int, timeout_s: float, is_one_host: bool) -> Any:
    library: Any = dist.ProcessGroupGloo
    if not is_one_host:  # it listens on GLOO_SOCKET_IFNAME, else on the address of the host name
        return library(store, rank, world_size, timeout=_timeout(timeout_s))
    return library(store, rank, world_size, gloo_options(_timeout(timeout_s), hostname="127.0.0.1"))


def _from_plugin(plugin: Any, store: Store, *, rank: int, world_size: int, timeout_s: float, name: str) -> Any:
    """Call the creator function of ``Backend.register_backend`` as torch does."""
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world_size, _timeout(timeout_s))
    timeout = _timeout(timeout_s)
    request = backend_request(store=store, rank=rank, world_size=world_size, timeout=timeout, name=name)
    return plugin.creator_fn(request, None)


def _why_undefined(op: str, dtype: torch.dtype) -> str:
    if dtype not in REDUCIBLE_DTYPES:
        return f"{dtype_name(dtype)} cannot be reduced, only moved"
    if op in BITWISE_OPS and (dtype.is_floating_point or dtype.is_complex):
        return "bits are of integers and bool"
    if op in ("min", "max") and dtype.is_complex:
        return "complex numbers have no order"
    if op == "avg" and dtype in (torch.bool, torch.uint64):
        return f"the mean of {dtype_name(dtype)} is left to the caller: reduce a wider dtype"
    if op == "premul_sum" and not (dtype.is_floating_point or dtype.is_complex):
        return "a factor is for floating-point numbers"
    return ""
