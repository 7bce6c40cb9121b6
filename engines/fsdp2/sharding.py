"""FSDP2 around a module: which parts are gathered at a time, and in which dtype.

A single worker has nothing to gather or to exchange. There FSDP would copy every block twice a step, its gradients
once, and run its hooks in Python around each: ``rlcore.compute_dtype`` casts the parameters instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
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
from rlcore.engines.fsdp2.meshes import RankMeshes, rank_meshes, sequence_group
from rlcore.errors import InvalidInputError, UnsupportedError
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
    ``compute_dtype``. Gradients of several micro-batches are added up in float32 all the same."""
    compute_dtype: str | None = None
    """Dtype of the parameters while they are gathered; None is ``dtype``. Gradients are reduced in float32. "float8" is
    bfloat16 whose blocks multiply in float8."""
    replicas: int = 1
    """Copies of the weights, each sharded over world size / ``replicas`` ranks (HSDP)."""
    sequence_parallel_size: int = 1
    """Ranks that share the tokens of each micro-batch (Ulysses). Weights are sharded over them, too."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks that compute the same tokens, each with its part of every large matrix."""
    expert_parallel_size: int = 1
    """Neighbouring ranks that have the experts among them; tokens travel to theirs. A multiple of
    ``tensor_parallel_size``."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Compute each block's activations again in the backward instead of keeping them. "selective" keeps the results of
    matrix products, of attention, and of operators that are not torch's own."""
    compile: bool = False
    """Compile the forward of each block."""
    reduce_each_micro_batch: bool = False
    """Exchange gradients after every micro-batch: more traffic, but each rank keeps only its part of them. Else whole
    gradients are held from the first micro-batch of a step to its last."""
    reshard_after_forward: bool = True
    """Free the gathered blocks after their forward, and gather them again for their backward. False keeps them between
    the two, in the compute dtype: each micro-batch gathers once. It is named as in torch's ``fully_shard``."""
    gather_bytes: int = 1 << 30
    """Neighbouring blocks of a list are gathered together up to this size; 0 gathers each alone. The host does as much
    for each exchange as for the work of a small block, and the device would wait for it."""
    device_norms: bool = True
    """Compute RMSNorm by the device's operator, where a plugin offers one with the module's results. Compiled blocks
    keep their own, which the compiler fuses with its neighbours."""
    deterministic: bool = False
    """Take torch's deterministic algorithms in ``train_batch``, ``eval_batch`` and ``forward_logprobs``, and not in
    methods of your own: the same batch and weights give the same bits each time. An operator that has none ends the
    call with a WorkerError that names torch's RuntimeError."""

    def __post_init__(self) -> None:
        compute_dtype = self.dtype if self.compute_dtype is None else self.compute_dtype
        for name, value, known in (("dtype", self.dtype, DTYPES), ("compute_dtype", compute_dtype, COMPUTE_DTYPES)):
            if value not in list(known):  # a list: some values have no hash
                raise InvalidInputError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        recompute = self.activation_checkpointing
        if not isinstance(recompute, bool) and recompute != "selective":
            raise InvalidInputError(f"activation_checkpointing must be False, True or 'selective', got {recompute!r}")
        for name in ("compile", "reduce_each_micro_batch", "reshard_after_forward", "device_norms", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in (
            "replicas",
            "gather_bytes",
            *(f"{kind}_parallel_size" for kind in ("sequence", "tensor", "expert")),
        ):
            value, least = getattr(self, name), 0 if name == "gather_bytes" else 1
            if type(value) is not int or value < least:
                raise InvalidInputError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.compile and (self.tensor_parallel_size > 1 or self.expert_parallel_size > 1):
            raise InvalidInputError(
                "compile=True does not go with tensor_parallel_size or expert_parallel_size: torch's compiler fails on "
                "layers that are cut by tensor parallelism (torch 2.13: RecursionError); leave it out"
            )

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
    blocks = blocks_of(module)
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
    _check_head(module, blocks)
    torch.empty(0, device=device)  # the mesh would choose a device for a process that has used none
    join_world()
    tensor, sequences = options.tensor_parallel_size, options.sequence_parallel_size
    experts = options.expert_parallel_size
    meshes = rank_meshes(device.type, size, replicas=options.replicas, tensor=tensor, experts=experts)
    group = None
    if sequences > 1:
        group = sequence_group(device.type, size, sequences=sequences, tensor=tensor)
        module.share_sequences(group)
    policy = MixedPrecisionPolicy(param_dtype=options.torch_compute_dtype, reduce_dtype=torch.float32)
    wrap = functools.partial(fully_shard, mp_policy=policy, reshard_after_forward=_reshard_after_forward(options))
    if meshes.split is not None:
        _shard_experts(module.split(meshes.split), meshes, wrap)
    gathered = gather_groups(module, blocks, options.torch_compute_dtype, options.gather_bytes)
    gathered.append([module])
    for together in gathered:
        wrap(together, mesh=meshes.fsdp)
        complete_hooks(together, options.torch_compute_dtype)
    # FSDP gathers the root's own parameters, head and embedding, for this method, and keeps them until the backward
    module.hidden_states = _without_views(module.hidden_states)  # type: ignore[method-assign]
    register_fsdp_forward_method(module, "hidden_states")
    return group


def _check_head(module: TrainModule, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse an output head in a block: the loss reads its weight outside, where FSDP does not average gradients."""
    head: list[Tensor | None] = []
    with contextlib.suppress(NotImplementedError, UnsupportedError, AttributeError):  # there is none, or none to train
        head = [*module.output_head()[:2]]
    for name, block in blocks.items():
        if any(own is part for own in block.parameters() for part in head):
            raise InvalidInputError(
                f"the output head of {type(module).__name__} has a parameter of {name!r}, whose class "
                f"{type(block).__name__} is in wrap_classes(); on several workers leave that class out"
            )


def _reshard_after_forward(options: Sharding) -> bool | None:
    """Return what ``fully_shard`` takes: its None frees the blocks, and keeps the root's own until the backward."""
    return None if options.reshard_after_forward else False


def _shard_experts(modules: Iterable[nn.Module], meshes: RankMeshes, wrap: Callable[..., Any]) -> None:
    """Shard modules whose experts are on several ranks. A rank's experts have tokens of all ranks of its group."""
    for module in modules:
        replace_method(module, "forward", _without_views)
        wrap(module, mesh=meshes.experts_fsdp)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(float(meshes.num_batches))
        if meshes.experts_fsdp.size(-1) > 1:  # else torch, which has nothing to scatter, would divide once more
            module.set_force_sum_reduction_for_comms(True)  # not every backend divides by another number than of ranks


def _compute_alone(module: TrainModule, options: Sharding) -> None:
    """Cast the parameters of a module that nothing gathers."""
    set_compute_dtype(module, options.torch_compute_dtype)
    for name in ("forward", "hidden_states"):
        replace_method(module, name, computing)


def blocks_of(module: TrainModule) -> dict[str, nn.Module]:
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
