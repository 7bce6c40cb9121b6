"""FSDP2 around a module: which parts are gathered at a time, and in which dtype.

A single worker has nothing to gather or to exchange. There FSDP would copy every block twice a step, its gradients
once, and run its hooks in Python around each: ``rlcore.compute_dtype`` casts the parameters instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from rlcore.compute_dtype import (
    ComputeDtype,
    computing,
    computing_inside,
    computing_outside,
    replace_method,
    set_compute_dtype,
    stop_computing,
)
from rlcore.engines._torch_private import is_view
from rlcore.engines.executors.materialize import retype
from rlcore.engines.fsdp2.block_compiler import BlockCompiler
from rlcore.engines.fsdp2.gather_groups import complete_hooks, gather_groups
from rlcore.errors import InvalidInputError
from rlcore.float8_linear import use_float8
from rlcore.nn import TrainModule
from rlcore.packed.sequence_parallel import SequenceGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPUTE_DTYPES = DTYPES | {"float8": torch.bfloat16}
"""Names of compute dtypes -> dtype of everything that is not rounded further for products: see ``float8_linear``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The build options of the executor ``fsdp2``: the layout of a module over the ranks, and how it is computed."""

    dtype: str = "float32"
    """Dtype of the parameters that are trained, and so of the optimizer's states; frozen ones have
    ``compute_dtype``."""
    compute_dtype: str | None = None
    """Dtype of the parameters while they are gathered; None is ``dtype``. Gradients are reduced in float32. "float8" is
    bfloat16 whose blocks multiply in float8."""
    replicas: int = 1
    """Copies of the weights, each sharded over world size / ``replicas`` ranks (HSDP)."""
    sequence_parallel_size: int = 1
    """Neighbouring ranks that share the tokens of each micro-batch (Ulysses). Weights are sharded over them, too."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Compute each block's activations again in the backward instead of keeping them. "selective" keeps the results of
    matrix products, of attention, and of operators that are not torch's own."""
    compile: bool = False
    """Compile the forward of each block."""
    reduce_each_micro_batch: bool = False
    """Exchange gradients after every micro-batch: more traffic, but each rank keeps only its part of them. Else whole
    gradients are held from the first micro-batch of a step to its last."""
    gather_bytes: int = 1 << 30
    """Neighbouring blocks of a list are gathered together up to this size; 0 gathers each alone. The host does as much
    for each exchange as for the work of a small block, and the device would wait for it."""
    device_norms: bool = True
    """Compute RMSNorm by the device's operator, where a plugin offers one with the module's results. Compiled blocks
    keep their own, which the compiler fuses with its neighbours."""

    def __post_init__(self) -> None:
        compute_dtype = self.dtype if self.compute_dtype is None else self.compute_dtype
        for name, value, known in (("dtype", self.dtype, DTYPES), ("compute_dtype", compute_dtype, COMPUTE_DTYPES)):
            if value not in list(known):  # a list: some values have no hash
                raise InvalidInputError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        recompute = self.activation_checkpointing
        if not isinstance(recompute, bool) and recompute != "selective":
            raise InvalidInputError(f"activation_checkpointing must be False, True or 'selective', got {recompute!r}")
        for name in ("compile", "reduce_each_micro_batch", "device_norms"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, least in (("replicas", 1), ("sequence_parallel_size", 1), ("gather_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidInputError(f"{name} must be a whole number of at least {least}, got {value!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_compute_dtype(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.compute_dtype or self.dtype]


def shard(
    module: TrainModule, options: Sharding, device: torch.device, join_world: Callable[[], Any], size: int
) -> SequenceGroup | None:
    """Shard a meta module over ``size`` ranks; a single rank keeps it whole.

    Args:
        join_world: makes the default process group; called if there are several ranks.

    Returns:
        The ranks that share the rows of ``hidden_states``; None where each rank has rows of its own.
    """
    retype(module, options.torch_dtype, options.torch_compute_dtype)
    blocks = _blocks(module)
    if options.compute_dtype == "float8":
        use_float8(blocks.values(), device)
    is_alone = size == 1 and options.torch_compute_dtype != options.torch_dtype
    compiler = BlockCompiler()
    for block in blocks.values():
        _replace_forward(block, options, is_alone=is_alone, compiler=compiler)
    if is_alone:
        _compute_alone(module, options)
    if size == 1:
        return None
    torch.empty(0, device=device)  # the mesh would choose a device for a process that has used none
    join_world()
    # torch takes meshes of one shape and one set of names for equal, and caches results of operations with their mesh:
    # the mesh of another engine in this process, whose groups may be gone, would come back.
    world = dist.group.WORLD.group_name  # type: ignore[union-attr]
    names = f"replicate_{world}", f"shard_{world}"
    mesh = init_device_mesh(device.type, (options.replicas, size // options.replicas), mesh_dim_names=names)
    group = None
    if options.sequence_parallel_size > 1:
        group = _share_sequences(module, options.sequence_parallel_size, device, size)
    policy = MixedPrecisionPolicy(param_dtype=options.torch_compute_dtype, reduce_dtype=torch.float32)
    gathered = gather_groups(module, blocks, options.torch_compute_dtype, options.gather_bytes)
    gathered.append([module])
    for together in gathered:
        fully_shard(together, mesh=mesh if options.replicas > 1 else mesh[names[1]], mp_policy=policy)
        complete_hooks(together, options.torch_compute_dtype)
    # FSDP gathers the root's own parameters, head and embedding, for this method, and keeps them until the backward
    module.hidden_states = _without_views(module.hidden_states)  # type: ignore[method-assign]
    register_fsdp_forward_method(module, "hidden_states")
    return group


def _share_sequences(module: TrainModule, num_ranks: int, device: torch.device, size: int) -> SequenceGroup:
    """Let groups of ``num_ranks`` neighbours each share the rows of ``hidden_states``; return this rank's group."""
    world = dist.group.WORLD.group_name  # type: ignore[union-attr]
    names = f"data_{world}", f"sequence_{world}"
    mesh = init_device_mesh(device.type, (size // num_ranks, num_ranks), mesh_dim_names=names)
    group = SequenceGroup(mesh.get_group(names[1]))
    module.share_sequences(group)
    return group


def _compute_alone(module: TrainModule, options: Sharding) -> None:
    """Cast the parameters of a module that nothing gathers."""
    set_compute_dtype(module, options.torch_compute_dtype)
    for name in ("forward", "hidden_states"):
        replace_method(module, name, computing)


def _blocks(module: TrainModule) -> dict[str, nn.Module]:
    """Return the blocks by name, the outermost first."""
    classes = set(module.wrap_classes())
    return {name: block for name, block in module.named_modules() if name and type(block).__name__ in classes}


def _replace_forward(block: nn.Module, options: Sharding, *, is_alone: bool, compiler: BlockCompiler) -> None:
    def replaced(forward: Callable[..., Any]) -> Callable[..., Any]:
        if is_alone:
            forward = computing_inside(forward, _compute_context(options))
        if options.activation_checkpointing:
            forward = functools.wraps(forward)(_checkpointed(forward, options))
        if options.compile:
            forward = compiler.compiled(forward, type(block))
        return computing_outside(forward) if options.compile and is_alone else forward

    replace_method(block, "forward", replaced)


def _checkpointed(forward: Callable[..., Any], options: Sharding) -> Callable[..., Any]:
    kept: dict[str, Any] = {}
    if options.activation_checkpointing == "selective":
        kept["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _selected)
    return functools.partial(checkpoint, forward, use_reentrant=False, **kept)


def _selected(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results that cost more to compute than to read: of products, attention and operators unknown to torch."""
    is_own = getattr(operator, "namespace", "") in {"aten", "prims"}
    is_cheap = is_own and getattr(operator, "overloadpacket", operator) not in flop_registry
    return CheckpointPolicy.PREFER_RECOMPUTE if is_cheap else CheckpointPolicy.MUST_SAVE


def _compute_context(options: Sharding) -> Callable[[ComputeDtype], AbstractContextManager[None]]:
    """Return the context of a block's forward that computes in another dtype than its parameters have."""
    if options.compile:
        return lambda _: nullcontext()  # the graph has the casts of the backward too
    return ComputeDtype.again if options.activation_checkpointing else ComputeDtype.keeping_no_casts


def _without_views(hidden_states: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Clone results that are views: FSDP hooks its backward to the result, and in-place writes to a view drop it."""

    @functools.wraps(hidden_states)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        hidden_TH = hidden_states(*args, **kwargs)
        return hidden_TH.clone() if is_view(hidden_TH) else hidden_TH

    return call


def reshard(module: nn.Module) -> None:
    """Free what FSDP keeps gathered after a forward without a backward: ``parameters()`` are the shards again."""
    stop_computing(module)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
