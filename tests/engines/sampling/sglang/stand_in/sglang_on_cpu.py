"""SGLang lacks modules on a machine without CUDA; ``sglang_on_cpu.pth`` imports this one when the interpreter starts.

Its kernel package has no build for the CPU: here every name of ``sgl_kernel`` can be imported, and none called. The
registry's torchvision is built for CUDA: without its library it asks for operators that torch then does not know.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_KERNELS = "sgl_kernel"


class _Kernel:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name}() needs SGLang's kernel package")


class _Hollow(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(_Kernel(self.__name__), name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name == "torchvision":
            _define_operators()
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _KERNELS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code."""


def _define_operators() -> None:
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Finder())
