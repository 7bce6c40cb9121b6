"""Contexts for the construction of modules: on the meta device for the user, on a real device for a worker.

The contexts of torch and accelerate with the same aim are recognized and can be undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_register_parameter = nn.Module.register_parameter
_is_building: ContextVar[bool] = ContextVar("rlcore_is_building", default=False)


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Put the parameters of modules that are made inside on the meta device; buffers stay real.

    Buffers are small. Many, such as rotary tables, are computed in constructors and are in no checkpoint.
    """
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # holds the originals, so that an id stays unique

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or _is_building.get():
            return parameter
        if id(parameter) not in moved:
            replacement = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            moved[id(parameter)] = (parameter, replacement)
        return moved[id(parameter)][1]

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # its stub says -> None
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def real_device() -> Iterator[None]:
    """Undo the meta contexts of rlcore, torch and accelerate while a worker in this process makes a module."""
    if not parameters_land_on_meta():
        yield
        return
    token = _is_building.set(True)
    try:
        with without_foreign_meta():
            yield
    finally:
        _is_building.reset(token)


@contextlib.contextmanager
def without_foreign_meta() -> Iterator[None]:
    """Undo ``torch.device("meta")`` and accelerate's ``init_empty_weights``, which patches this method."""
    patched, nn.Module.register_parameter = nn.Module.register_parameter, _register_parameter  # type: ignore[method-assign]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = patched  # type: ignore[method-assign]


def parameters_land_on_meta() -> bool:
    probe = nn.Module()
    probe.register_parameter("probe", nn.Parameter(torch.empty(0)))  # an empty parameter draws no random number
    return bool(probe.get_parameter("probe").is_meta)
