"""The private names of torch that several parts of rlcore need; ``collectives``, ``devices``, ``kernels`` and
``engines`` have a file of this name for what they alone need.

No other file uses a private name of torch. Each docstring says why there is no public one, and since which torch the
name has worked as written here: 2.10 is the oldest torch that rlcore supports. ``tests/test_torch_private.py`` checks
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.nn.attention import SDPBackend
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _python_dispatch, _pytree

Backend = _distributed_c10d.Backend
"""A back end of collectives; the public name is that of its registry. Since torch 2.10."""
FileStore = _distributed_c10d.FileStore
HashStore = _distributed_c10d.HashStore
PrefixStore = _distributed_c10d.PrefixStore
TCPStore = _distributed_c10d.TCPStore
ProcessGroup = _distributed_c10d.ProcessGroup
Store = _distributed_c10d.Store
"""``torch.distributed`` has these six too, but does not export them to type checkers. Since torch 2.10."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operation of torch. The documentation names it by this path, as there is no other. Since torch 2.10."""
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only
"""Nested lists, tuples and dicts as torch and its compiler know them. There is no public path. Since torch 2.10."""

_aten: Any = torch.ops.aten
COPY_TO = _aten._to_copy.default
"""The operation of ``tensor.to(...)``. Operators of ATen have no public names. Since torch 2.10."""
RESHAPE = _aten._unsafe_view.default
"""The operation of a reshape with one user. Operators of ATen have no public names. Since torch 2.10."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has: whoever remembers it keeps the storage alive.

    A storage without memory has no address of its own, and Python's object of a storage may end before the storage.
    Since torch 2.10.
    """
    return int(storage._cdata)


def storage_at(address: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """Return a storage of memory that it does not own.

    Public constructors take memory of the host only. Since torch 2.10.
    """
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)  # torch's stub is wrong
    return made  # type: ignore[no-any-return]


def copy_all(dst: list[Tensor], src: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy many tensors by as few kernels as torch can. The public functions take one pair. Since torch 2.10."""
    torch._foreach_copy_(dst, src, non_blocking=non_blocking)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of the parameters of one module, without its submodules; it may be changed.

    ``register_parameter`` refuses a name that a property of the class has, ``setattr`` calls the property, and
    ``named_parameters`` takes several times as long. Since torch 2.10.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of the buffers of one module; it may be changed.

    ``register_buffer`` would forget which buffers are not persistent. Since torch 2.10.
    """
    return module._buffers


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of one module that its checkpoints have. ``state_dict()`` runs hooks. Since torch 2.10."""
    away = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None and name not in away}


def own_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and persistent buffers of modules, without their submodules. Since torch 2.10."""
    found: list[Tensor | None] = []
    for module in modules:  # tens of thousands: a call for each would take longer than all of this
        found += module._parameters.values()
        if module._buffers:
            found += persistent_buffers(module).values()
    return [tensor for tensor in found if tensor is not None]


def schedulers_in(scheduler: LRScheduler) -> Sequence[LRScheduler]:
    """Return those that a SequentialLR or ChainedScheduler steps; none of another scheduler. Since torch 2.10."""
    return getattr(scheduler, "_schedulers", ())


def own_modules(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return the submodules of one module. ``children()`` takes several times as long. Since torch 2.10."""
    return module._modules


def strided_split(placement: Any) -> int | None:
    """Return the parts into which tensor parallelism has cut a dimension that FSDP then cut; None if it did not.

    FSDP2 over tensor parallelism names its placement by this class, which has no public name. Since torch 2.10.
    """
    from torch.distributed.tensor.placement_types import _StridedShard  # takes a while

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def root_of(mesh: Any) -> Any:
    """Return the mesh of which ``mesh`` has some of the dimensions, or itself.

    A mesh alone does not say which other ranks have the same place in it. Since torch 2.10, where the table of all
    meshes may have the method.
    """
    from torch.distributed import device_mesh  # takes a while

    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    table: Any = device_mesh._mesh_resources
    return table.get_root_mesh(mesh)


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation: its arguments, and which of them it changes.

    The public ``torch.library`` gives schemas of the user's own operators only. Since torch 2.10.
    """
    return operation._schema


def numbers_of_writes(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number of each tensor that grows with every write in place to its memory. There is no public one.

    Since torch 2.10.
    """
    return [tensor._version for tensor in tensors]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward pass that runs now. There is no public hook. Since torch 2.10."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def fake_tensors() -> Any:
    """Return a context in which new tensors have a shape, a dtype and a device, and no values.

    Tensors on the meta device are no substitute: a model sees their device. Since torch 2.10.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def check_can_run_triton(device: torch.device) -> None:
    """Raise an ImportError, NotImplementedError or RuntimeError if torch's compiler cannot use triton on a device.

    The public functions only tell that a compiler is installed. Since torch 2.10.
    """
    from torch._dynamo.device_interface import get_interface_for_device

    interface: Any = get_interface_for_device(device.type)
    interface.raise_if_triton_unavailable(device)


def takes_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if torch's causal attention takes cuDNN's kernels for these, forward and backward.

    The public ``can_use_cudnn_attention`` does not tell which of the possible kernels it prefers. Since torch 2.10.
    """
    is_grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=is_grouped)
    return bool(chosen == SDPBackend.CUDNN_ATTENTION.value)


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return a b times the scales of rows and columns, in bfloat16; ``b`` is stored by columns.

    ``torch.nn.functional.scaled_mm``, which is public, is unknown to the partitioner of torch's compiler: what it
    returns would be computed again in the backward. Since torch 2.10.
    """
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)
