"""The private names of torch that engines need; see ``rlcore/_torch_private.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

_c10d: Any = distributed_c10d


# ------------------------------------------------------------------------------------------- groups of the process


def process_groups() -> list[Any]:
    """Return the groups that ``dist.destroy_process_group()`` would end, in the order in which they were made.

    Since torch 2.10.
    """
    return list(_c10d._world.pg_map)


def num_named_groups() -> int:
    """Return the number from which torch makes the name of the next group. Since torch 2.10."""
    return int(_c10d._world.group_count)


def store_of(group: object) -> Any:
    """Return the part of the store in which a group of this process has its own keys. Since torch 2.10."""
    _, store = _c10d._world.pg_map[group]
    return store


def set_default_group(group: object, num_named: int) -> None:
    """Make ``group`` the default of the process, or leave it without one; torch names the next by ``num_named``.

    The public ``dist.group.WORLD = group`` leaves the rank that logs show, and there is no public way to the number.
    Since torch 2.10.
    """
    _c10d._update_default_pg(group)
    _c10d._world.group_count = num_named


# ------------------------------------------------------------------------------------------------------------ FSDP


def fsdp_pre_backward(module: nn.Module) -> Callable[[Any], Any]:
    """Return the function of a sharded module that prepares its backward to begin at the tensors of an output.

    ``fully_shard`` of a list calls it for the output of the last module only. Since torch 2.10.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    return state._register_pre_backward_hook  # type: ignore[no-any-return]


def forget_forwards(module: nn.Module) -> None:
    """Let a list of modules that FSDP gathers together begin anew, after one of them has failed.

    torch 2.10 to 2.12 count the others as in use for ever. Later ones have ``FSDPModule.reset_iter_state()``.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    state._modules_to_run_forward.clear()


def drop_unreduced_gradients(module: nn.Module) -> None:
    """Drop the gradients of a sharded module that have not been exchanged, whether or not it is gathered now.

    They are those of the gathered parameters, and sums that it keeps apart where it computes in another dtype than it
    exchanges in. Later versions have several groups of parameters a module. Since torch 2.10.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for parameter in (one for group in groups if group is not None for one in group.fsdp_params):
        parameter.unsharded_accumulated_grad = None
        if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
            gathered.grad = None


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd knows a tensor as a view of another. There is no public way. Since torch 2.10."""
    return tensor._base is not None


# -------------------------------------------------------------------------------------------------------- optimizers


def divide_all(tensors: list[Tensor], divisor: Tensor) -> None:
    """Divide many tensors in place by as few kernels as torch can. The public functions take one. Since torch 2.10."""
    torch._foreach_div_(tensors, divisor)


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Return True if a step reads ``grad_scale`` and ``found_inf`` on the device, as torch's GradScaler asks.

    GradScaler reads the same flag, which has no public name. Since torch 2.10.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# ---------------------------------------------------------------------------------------------------------- compiler


def allow_graphs(most: int) -> None:
    """Let the compiler of this process make so many graphs of one code.

    Later versions of ``torch.compile`` take it as ``recompile_limit``, for one function. Since torch 2.10.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, most)


def is_compiler_off() -> bool:
    """Return True if this process runs what ``torch.compile`` wraps as it is, as with ``TORCH_COMPILE_DISABLE=1``.

    There is no public name of it. Since torch 2.10.
    """
    import torch._dynamo.config

    config: Any = torch._dynamo.config
    return bool(config.disable)


def compile_keeping_less(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compile by Inductor; the backward makes again what one pass over memory makes, instead of reading what was kept.

    ``torch.compile(options=...)`` takes options of Inductor only. Since torch 2.10.
    """
    import torch._dynamo
    import torch._functorch.config

    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)


@contextmanager
def inductor_as_it_is() -> Iterator[None]:
    """Give Inductor its deterministic mode back as it was: torch 2.13's ``use_deterministic_algorithms`` sets that too.

    There is no public name of it.
    """
    import torch._inductor.config

    config: Any = torch._inductor.config
    with config.patch(deterministic=config.deterministic):
        yield


# --------------------------------------------------------------------------------------------------- plans of memory

_aten: Any = torch.ops.aten
READ_SCALAR = _aten._local_scalar_dense.default
"""The operation of ``tensor.item()``. Operators of ATen have no public names. Since torch 2.10."""
CHANGES_VALUES_ALONE = frozenset(
    {
        *(_aten._fused_adamw_.default, _aten._fused_adamw_.tensor_lr),
        *(_aten._fused_adam_.default, _aten._fused_adam_.tensor_lr),
        *(_aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr),
        *(_aten._assert_async.default, _aten._assert_async.msg),
    }
)
"""Operators that change or check values in place, without memory of their own; those of fused optimizers have no form
for the meta device. Operators of ATen have no public names. Since torch 2.10."""
ADDS_PRODUCT = _aten.addmm.dtype_out
"""The operator of ``torch.addmm(out_dtype=, out=)``, which has no memory of its own. On the meta device torch 2.11 runs
the code of another overload for it, which fails. Since torch 2.10."""
CHANGED_BY_AUTOGRAD = frozenset({_aten.add.Tensor, _aten.index_put.default})
"""Operators by which autograd sums gradients and puts them to their rows. Into a tensor that nobody else has it writes
in place, but not while a dispatch mode sees it: see ``reuses_gradient``. Since torch 2.10."""
HOST_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
FLASH_ATTENTION = _aten._scaled_dot_product_flash_attention
MASKED_ATTENTION = _aten._scaled_dot_product_efficient_attention
"""The operators of ``scaled_dot_product_attention`` on a host, on an accelerator, and there with a mask or values of
another width than queries; on the meta device the public function holds all scores. Since torch 2.10."""


def reuses_gradient(gradient: Tensor) -> bool:
    """Return True if autograd, without a dispatch mode, would write into ``gradient`` what it computes from it now.

    See ``can_accumulate_inplace`` of ``torch/csrc/autograd/input_buffer.cpp``. Neither the node that runs nor the
    number of tensors that share a storage has a public name. Functions of Python, which run as nodes too, say
    themselves what they write into. Since torch 2.10.
    """
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled() or isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    storage: Any = gradient.untyped_storage()
    owners = torch._C._storage_Use_Count(storage._cdata) - 1  # one is the object of this line
    return bool(owners == 1 and gradient.nbytes == storage.nbytes())


def device_lists_of_optimizers() -> list[tuple[Any, str, bool]]:
    """Return who lists the devices with kernels for many tensors: (module, function, is asked for hosts too).

    Optimizers and norms take another implementation for devices that are not listed. Since torch 2.10.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    foreach, fused = "_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"
    return [(_foreach_utils, foreach, True), (optimizer, fused, True), (optimizer, foreach, False)]


def dump_allocator(device_type: str, file: Path) -> bool:
    """Write a snapshot of a device's allocator for https://pytorch.org/memory_viz; False where torch has none.

    The documentation names it by this private name. Since torch 2.10.
    """
    try:
        memory: Any = importlib.import_module(f"torch.{device_type}.memory")
    except ImportError:
        return False
    dump = getattr(memory, "_dump_snapshot", None)
    if dump is None:
        return False
    dump(str(file))
    return True
