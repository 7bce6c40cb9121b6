"""Hooks that turn the use of absent tensors, a segmentation fault, into an error that names the call to make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rlcore.errors import StateError


class Guard:
    """While it is up, the guarded objects raise ``StateError`` when used."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def guard_module(self, module: nn.Module, message: str) -> None:
        """Refuse ``forward`` of the module and of each part, and ``state_dict``."""
        refuse = _refusal(message)
        for part in module.modules():
            # before the hooks of FSDP, which read the weights
            self._handles.append(part.register_forward_pre_hook(refuse, prepend=True))
        self._handles.append(module.register_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]

    def guard_optimizers(self, optimizers: Iterable[Optimizer], message: str) -> None:
        """Refuse ``step`` and ``state_dict``."""
        refuse = _refusal(message)
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(refuse))
            self._handles.append(optimizer.register_state_dict_pre_hook(refuse))

    def lift(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _refusal(message: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StateError(message)

    return refuse
