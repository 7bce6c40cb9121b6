"""Hooks that turn the use of absent tensors, a segmentation fault, into an error that names the call to make."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rlcore.errors import StateError

_REPLACED = ("__deepcopy__", "_apply", "_load_from_state_dict", "reset_parameters")
"""Methods of a module for which torch has no hook, or a slow one; ``_apply`` moves, converts and shares its tensors."""


class Guard:
    """Makes objects raise ``StateError`` when they are used, until it is lifted."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle | _Replaced] = []
        # One hook belongs to no guarded object, so nothing else would remove it.
        weakref.finalize(self, _lift, self._handles).atexit = False

    def guard_module(self, module: nn.Module, message: str) -> None:
        """Refuse every use of the parameters of the module or of a part of it, and steps of any optimizer of them."""
        refuse = _refusal(message)
        for part in module.modules():
            # before the hooks of FSDP, which read the weights
            self._handles.append(part.register_forward_pre_hook(refuse, prepend=True))
            self._handles.append(part.register_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
            self._handles += [_Replaced(part, name, message) for name in _REPLACED]
        parameters = frozenset(module.parameters())

        def refuse_theirs(optimizer: Optimizer, *_: object) -> None:
            if any(not parameters.isdisjoint(group["params"]) for group in optimizer.param_groups):
                raise StateError(message)

        self._handles.append(register_optimizer_step_pre_hook(refuse_theirs))

    def guard_optimizers(self, optimizers: Iterable[Optimizer], message: str) -> None:
        """Refuse every use of the optimizers' states."""
        refuse = _refusal(message)
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(refuse))
            self._handles.append(optimizer.register_state_dict_pre_hook(refuse))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(refuse))
            self._handles.append(_Replaced(optimizer, "__deepcopy__", message))

    def guard_steps(self, optimizers: Iterable[Optimizer], message: str) -> None:
        """Refuse ``step`` alone, which needs gradients."""
        self._handles += [optimizer.register_step_pre_hook(_refusal(message)) for optimizer in optimizers]

    def guard_zero_grad(self, owners: Iterable[nn.Module | Optimizer], message: str) -> None:
        """Refuse ``zero_grad``, which would not find the gradients that come back later."""
        self._handles += [_Replaced(owner, "zero_grad", message) for owner in owners]

    def guard_method(self, owner: object, name: str, message: str) -> None:
        """Refuse one method of an object."""
        self._handles.append(_Replaced(owner, name, message))

    def lift(self) -> None:
        _lift(self._handles)


class _Refuser:
    """Stands for a method of one object as long as there are messages: several guards may refuse the same method."""

    def __init__(self, before: object) -> None:
        self.before = before
        self.messages: list[str] = []

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise StateError(self.messages[-1])


class _Replaced:
    """Refuses a method of one object, for which torch has no hook. Guards may be lifted in any order."""

    def __init__(self, owner: object, name: str, message: str) -> None:
        self._own = vars(owner)
        self._name, self._message = name, message
        before = self._own.get(name)
        self._refuser = before if isinstance(before, _Refuser) else _Refuser(before)
        self._refuser.messages.append(message)
        self._own[name] = self._refuser

    def remove(self) -> None:
        self._refuser.messages.remove(self._message)
        if self._refuser.messages:
            return
        if self._refuser.before is None:
            del self._own[self._name]
        else:
            self._own[self._name] = self._refuser.before


def _lift(handles: list[RemovableHandle | _Replaced]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _refusal(message: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise StateError(message)

    return refuse
