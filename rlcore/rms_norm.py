"""RMSNorm by an operator of the device: the modules stay as they are, only their forward is replaced.

Plugins register ``fn(x, weight, eps) -> y`` as "rms_norm". The first call for a kind of norm and a dtype tries it on
the device. It is used only if its values and gradients are those of the module's own class. So a norm that adds one
to its weight, or that returns another dtype, keeps its own forward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlcore import probing
from rlcore._torch_private import own_buffers, own_modules, own_parameters
from rlcore.registry import registry, resolve

logger = logging.getLogger(__name__)

OPERATOR = "rms_norm"
_EPS = ("variance_epsilon", "eps", "epsilon")
_PROBE_ROWS = 64
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""The largest relative error of a row: a few roundings. Without eps the error is one half in some rows."""

Norm = Callable[[Tensor, Tensor, float], Tensor]


class _NormKind(NamedTuple):
    """The properties that two norms with the same computation share."""

    cls: type[nn.Module]
    attributes: tuple[tuple[str, Hashable], ...]
    width: int
    eps: float


def use_device_norms(module: nn.Module, device: torch.device) -> None:
    """Let the RMSNorm modules of ``module`` use the device's operator; nothing changes where there is none.

    Their own forward runs under torch.compile and autocast, on other devices, and with fake or distributed tensors.
    Second derivatives go through the device's operator, which may not have them.
    """
    if not _offered(device.type):
        return
    for part in module.modules():
        kind = _kind(part)
        if kind is not None:
            part.forward = MethodType(_asking(kind, device.type), part)


def _kind(part: nn.Module) -> _NormKind | None:
    """Return the kind of a plain RMSNorm; None for any other module, and for one whose forward was replaced."""
    is_norm = type(part).__name__.endswith("RMSNorm") or getattr(part, "kernel_layer_name", None) == "RMSNorm"
    own = {name: value for name, value in vars(part).items() if not name.startswith("_") and name != "training"}
    eps = next((own[name] for name in _EPS if isinstance(own.get(name), float)), None)
    weight = own_parameters(part).get("weight")
    if not is_norm or eps is None or weight is None or weight.dim() != 1:
        return None
    if len(own_parameters(part)) > 1 or own_buffers(part) or own_modules(part) or not all(map(_is_plain, own.values())):
        return None
    return _NormKind(type(part), tuple(own.items()), len(weight), eps)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, type(None)))


@functools.cache  # one function for a kind: the compiler reuses code for modules that share it
def _asking(kind: _NormKind, device_type: str) -> Callable[..., Any]:
    plain = kind.cls.forward

    @functools.wraps(plain)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs or len(args) != 1:
            return plain(module, *args, **kwargs)
        x, weight = args[0], module.weight
        is_usual = type(x) is Tensor and type(weight) in {Tensor, nn.Parameter} and x.device.type == device_type
        if not is_usual or not x.numel() or torch.is_autocast_enabled(device_type):
            return plain(module, x)
        norm = choose(kind, x.device, x.dtype, weight.dtype)
        return plain(module, x) if norm is None else norm(x, weight, kind.eps)  # type: ignore[arg-type]

    return forward


def _offered(device_type: str) -> list[tuple[str, Norm]]:
    entries = [entry for entry in registry().ops.get(OPERATOR, ()) if entry.device_type in (device_type, "*")]
    return [(entry.name, resolve(entry.path)) for entry in sorted(entries, key=lambda entry: -entry.priority)]


@functools.cache
def choose(kind: _NormKind, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype) -> Norm | None:
    """Return the first operator of the device that computes what the module computes; None if there is none."""
    found, said = None, []
    for name, norm in _offered(device.type):
        reason = probing.why_not(_probe, norm, kind, dtype, weight_dtype, device=device)
        said.append(f"{name} runs" if reason is None else f"not {name}: {reason}")
        if reason is None:
            found = norm
            break
    logger.info("%s of %d in %s on %s: %s", kind.cls.__name__, kind.width, dtype, device.type, "; ".join(said))
    return found


def _probe(
    norm: Norm, kind: _NormKind, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why results or gradients differ from those of the module's class in float32, or None."""
    if dtype not in _TOLERANCE:
        return f"it is not tried in {dtype}"
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 1, _PROBE_ROWS)[:, None]  # in the smallest rows eps is half of the divisor
    x = (torch.randn(_PROBE_ROWS, kind.width, generator=generator) * scale).to(device, dtype)
    weight = (1 + 0.5 * torch.randn(kind.width, generator=generator)).to(device, weight_dtype)
    gradient = torch.randn(_PROBE_ROWS, kind.width, generator=generator).to(device)

    def run(compute: Callable[[Tensor, Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        output = compute(*leaves)
        return [output.detach(), *torch.autograd.grad((output.float() * gradient).sum(), leaves)]

    kept = _plain(kind, x, weight).dtype
    found = run(lambda x, weight: norm(x, weight, kind.eps), x, weight)
    if found[0].dtype != kept:
        return f"it gives {found[0].dtype}, the module {kept}"
    expected = run(functools.partial(_plain, kind), x.float(), weight.float())
    for part, got, wanted in zip(("output", "dx", "dweight"), found, expected, strict=True):
        error = float(((got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
        if not error <= _TOLERANCE[dtype]:
            return f"its probe gave another {part}: relative error {error:.1e}"
    return None


def _plain(kind: _NormKind, x: Tensor, weight: Tensor) -> Tensor:
    module = kind.cls.__new__(kind.cls)
    nn.Module.__init__(module)
    vars(module).update(kind.attributes)
    own_parameters(module)["weight"] = weight  # type: ignore[assignment]  # a leaf with a gradient
    result: Tensor = kind.cls.forward(module, x)
    return result
