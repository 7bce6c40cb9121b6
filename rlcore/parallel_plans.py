"""Tensor and expert parallelism of transformers models, by the plans that transformers has for them.

A plan gives modules and parameters a style by name, such as "colwise" for ``layers.*.self_attn.q_proj``: how the ranks
share the parameter, and what they exchange around the module. The styles are transformers' own, with one exception
(``_sum_gradients``).

Tensor parallelism cuts every large matrix among neighbouring ranks, which compute the same tokens. Expert parallelism
gives each rank whole experts, and tokens travel to theirs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from rlcore._torch_private import own_parameters
from rlcore.weights.adapters import adapted_layers, base_name

_SUMMED = "replicated_with_grad_allreduce"
_DISPATCH = "ep_dispatch_experts"
_OWN_EXPERTS = "grouped_gemm"
_PACKED = ("packed_colwise", "packed_rowwise")
_ADAPTED = {"colwise": "lora_B", "rowwise": "lora_A"}
"""The matrix of a LoRA adapter that is cut as its layer is; the other one is whole on every rank."""


class Sizes(NamedTuple):
    """Numbers of ranks."""

    tensor: int = 1
    experts: int = 1
    sequences: int = 1


class Meshes(NamedTuple):
    """The ranks that share the weights, as this rank sees them; of one rank where they share none."""

    tensor: DeviceMesh
    experts: DeviceMesh


class _Rules(NamedTuple):
    """The rules that a plan has for one model."""

    parameters: dict[str, str]
    """Name of a parameter -> style."""
    modules: dict[str, str]
    """Path of a module -> style."""


# ----------------------------------------------------------------------------------------------------------- checks


def why_not_split(model: Any, sizes: Sizes) -> str | None:
    """Return the reason why the weights of a model cannot be shared by so many ranks, or None. Changes nothing."""
    styles, needed = _styles(), [_SUMMED] if sizes.experts == 1 else [_SUMMED, _DISPATCH]
    if lacking := [name for name in needed if name not in styles]:
        from transformers import __version__

        return f"transformers {__version__} has no style {lacking[0]!r} that training can use; install 5.21 or newer"
    return next(_reasons(model, sizes), None)


def _styles() -> Mapping[str, Any]:
    """Return the styles of transformers that cut parameters as DTensors; none of a version that cuts otherwise."""
    for module in ("expert_parallel", "tensor_parallel"):  # the first registers all, where it is there
        try:
            found = importlib.import_module(f"transformers.distributed.{module}")
        except ImportError:
            continue
        styles: Mapping[str, Any] = found.ALL_PARALLEL_STYLES
        return styles if hasattr(styles["colwise"], "shard_param") else {}
    return {}


def _reasons(model: Any, sizes: Sizes) -> Iterator[str]:
    name = type(model).__name__
    if sizes.tensor > 1 and not model.tp_plan:
        yield f"transformers has no tensor-parallel plan for {name}"
    if sizes.experts > 1 and not model.ep_plan:
        yield f"transformers has no expert-parallel plan for {name}, which may have no experts"
    tensor, experts = _rules(model, sizes)
    if sizes.tensor > 1:
        yield from _dropouts(model)
        yield from _heads(model, sizes)
        yield from _unsummed(model, tensor)
    held = dict(model.named_parameters(remove_duplicate=False))
    for path, style in tensor.parameters.items():
        if style in _PACKED and held[path].dim() > 1:
            yield (
                f"a rank's part of {path} would be several pieces of it ({style}); "
                f"give experts to ranks whole: expert_parallel_size={sizes.tensor}, or a multiple"
            )
    for path, style in experts.parameters.items():
        if style == _OWN_EXPERTS and len(held[path]) % sizes.experts:
            yield f"{len(held[path])} experts do not divide by {sizes.experts}; take a divisor of them"
    for path in adapted_layers(model):
        base = base_name({}, path) or path
        styles = {rules.modules.get(f"{path}.base_layer") for rules in (tensor, experts)} - {None}
        inside = any(base.startswith(f"{module}.") for module in experts.modules)
        if inside or styles - _ADAPTED.keys():
            yield f"an adapter on {path} is not cut with its layer; leave it out of target_modules"


def _dropouts(model: Any) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            yield f"{path} drops values out, and each rank would drop others; set its probability to 0"
    if getattr(model.config.get_text_config(), "attention_dropout", 0):
        yield "its attention drops values out, and each rank would drop others; set attention_dropout to 0"


def _heads(model: Any, sizes: Sizes) -> Iterator[str]:
    from rlcore.packed.attention import why_heads_not_split  # an optional package, which is installed here

    if reason := why_heads_not_split(model.get_decoder(), sizes.tensor, sizes.sequences):
        yield reason


def _unsummed(model: Any, rules: _Rules) -> Iterator[str]:
    from rlcore.packed.partial_gradients import why_not_summed  # beside transformers, an optional package

    decoder = model.get_decoder()
    place = next(path for path, module in model.named_modules() if module is decoder)
    layers, styles = adapted_layers(model), {}
    for path, style in rules.modules.items():
        if base := base_name(layers, path):
            styles[base.removeprefix(f"{place}.")] = style
    if reason := why_not_summed(decoder, styles):
        yield reason


# ------------------------------------------------------------------------------------------------------------ rules


def _rules(model: Any, sizes: Sizes) -> tuple[_Rules, _Rules]:
    """Return what is done by tensor and by expert parallelism. What the latter has is not cut by the former."""
    experts = _expanded(model, model.ep_plan if sizes.experts > 1 else {})
    tensor = _expanded(model, model.tp_plan if sizes.tensor > 1 else {})

    def is_left(path: str) -> bool:
        return not any(path == module or path.startswith(f"{module}.") for module in experts.modules)

    kept = (dict(filter(lambda rule: is_left(rule[0]), rules.items())) for rules in tensor)
    return _Rules(*kept), experts


def _expanded(model: Any, plan: Mapping[str, str]) -> _Rules:
    """Return the rules of a plan by the names of this model, whose layers may have adapters."""
    layers = adapted_layers(model)
    rules = _Rules({}, {})
    for path, module in model.named_modules():
        if path in layers or not plan:
            continue
        base = base_name(layers, path)
        style = _style_of_adapter(layers, path, plan) if base is None else plan.get(_any_layer(base))
        if style is not None:
            rules.modules[path] = style
        for leaf, _ in module.named_parameters(recurse=False):
            own = None if base is None else plan.get(_any_layer(f"{base}.{leaf}"))
            if found := own or style:
                rules.parameters[f"{path}.{leaf}"] = found
    return rules


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _style_of_adapter(layers: Mapping[str, Any], path: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of a submodule of an adapter."""
    layer = next(one for one in layers if path.startswith(f"{one}."))
    style = plan.get(_any_layer(layer), "")
    return style if path.startswith(f"{layer}.{_ADAPTED.get(style)}.") else None


# -------------------------------------------------------------------------------------------------------- splitting


def split(model: Any, meshes: Meshes) -> list[nn.Module]:
    """Cut the meta parameters of a model as its plans say, and let its modules exchange what they must.

    ``why_not_split`` has found no reason against it.

    Returns:
        The modules whose experts travel, which are on ``meshes.experts``.
    """
    from rlcore.packed.attention import split_heads

    registry = _styles()
    sizes = Sizes(meshes.tensor.size(), meshes.experts.size())
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    modules = dict(model.named_modules())
    tensor, experts = _rules(model, sizes)
    for rules, mesh in ((tensor, meshes.tensor), (experts, meshes.experts)):
        for name, style in rules.parameters.items():
            path, _, leaf = name.rpartition(".")
            registry[style].shard_param(modules[path], leaf, mesh)
        for path, style in rules.modules.items():
            if style == _SUMMED:
                _sum_gradients(modules[path], mesh.get_group())
            elif style == _DISPATCH:
                registry[style].install_forward(modules[path], ep_mesh=mesh, tp_mesh=meshes.tensor)
            else:
                registry[style].install_forward(modules[path], mesh)
    for first, *others in names.values():
        _tie(modules, first, others)
    split_heads(model.get_decoder(), sizes.tensor)
    return [modules[path] for path, style in experts.modules.items() if style == _DISPATCH]


def _tie(modules: Mapping[str, nn.Module], first: str, others: list[str]) -> None:
    """Let names that shared a parameter share it again, as the rule of the first has cut it."""
    path, _, leaf = first.rpartition(".")
    for other in others:
        owner, _, name = other.rpartition(".")
        own_parameters(modules[owner])[name] = own_parameters(modules[path])[leaf]


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a module that each rank runs on other heads get the gradient of all ranks.

    transformers' own style sums what is in ``parameter.grad`` after each backward. Where micro-batches are added up
    there, it sums those before once more.
    """
    forward: Callable[..., Any] = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        held = own_parameters(module)
        given = dict(held)
        for name, parameter in given.items():
            if parameter is not None and parameter.requires_grad:
                held[name] = _SumOfGradients.apply(parameter, group)  # type: ignore[no-untyped-call]
        try:
            return forward(*args, **kwargs)
        finally:
            held.update(given)

    module.forward = call


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.to(torch.float32, copy=True)
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None
