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
        self._handles: list[RemovableHandle | _Replaced] = []

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

    def guard_zero_grad(self, owners: Iterable[nn.Module | Optimizer], message: str) -> None:
        """Refuse ``zero_grad``, which would not find gradients that are to come back."""
        self._handles += [_Replaced(owner, "zero_grad", _refusal(message)) for owner in owners]

    def lift(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Replaced:
    """A method of one object, for which torch has no hook."""

    def __init__(self, owner: Any, name: str, by: Any) -> None:
        self._own = vars(owner)
        self._name = name
        self._before = self._own.get(name)
        self._own[name] = by

    def remove(self) -> None:
        if self._before is None:
            del self._own[self._name]
        else:
            self._own[self._name] = self._before


def _refusal(message: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StateError(message)

    return refuse
