"""A module under DeepSpeed's ZeRO, as a sharding strategy.

DeepSpeed's engine wraps a root module around the user's, whose forward is whatever is to be computed: the hidden
states, the head and the loss. So ZeRO 3 gathers the weights of the head, too, which is read outside of any forward of
the user's module. Calls of the user's own methods take the same way.

The private names of DeepSpeed that it needs are in ``_deepspeed_private.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.device import Device
from rlcore.engines.deepspeed._deepspeed_private import (
    ZeroEngine,
    forget_forward,
    forget_gradients,
    leave_overflow_to_the_norm,
    partition_all,
    set_inner_optimizer,
)
from rlcore.engines.deepspeed.options import ZeroOptions
from rlcore.engines.executors.strategy import ShardingStrategy
from rlcore.errors import StateError, UnsupportedError
from rlcore.nn import TrainModule, optimizers_of

T = TypeVar("T")
_OWNER = "_rlcore_zero"
_REFUSED = {
    "Adagrad": "DeepSpeed makes another of its own",
    "Adafactor": "it looks at rows, columns and whole parameters, and ZeRO gives it flat parts of a group",
    "Muon": "it takes matrices, and ZeRO gives it flat parts of a group",
    "LBFGS": "it computes the loss again within a step",
    "SparseAdam": "it takes sparse gradients, and those of ZeRO are dense",
}
"""Optimizers of torch that cannot step flat parts of a group, or that DeepSpeed does not take as they are."""


class _Root(nn.Module):
    """The module that DeepSpeed's engine holds: its forward runs what it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class Zero(ShardingStrategy):
    """Parameters, gradients and optimizer states of a module under ZeRO 1, 2 or 3.

    Args:
        library: the package ``deepspeed``.
        module: real, with its optimizer; in stage 3 its parameters are partitioned already.
        optimizer: the module's only optimizer; None trains nothing.
    """

    def __init__(
        self, library: Any, module: TrainModule, optimizer: Optimizer | None, options: ZeroOptions, device: Device
    ) -> None:
        super().__init__(module, device)
        self.stage = options.stage
        self.optimizer = optimizer
        self.groups = [list(group["params"]) for group in optimizer.param_groups] if optimizer is not None else []
        """The parameters of each group of the optimizer, in which DeepSpeed puts flat ones in their place."""
        self._is_inside = self._is_stepping = False
        self.root = _Root(module)
        self._engine: ZeroEngine | None = None
        if optimizer is not None or options.stage == 3:
            num_elements = sum(getattr(one, "ds_numel", one.numel()) for one in module.parameters())
            config = options.deepspeed_config(num_elements)
            self._engine, *_ = library.initialize(
                model=self.root, optimizer=optimizer, config=config, dist_init_required=False
            )
        if optimizer is not None:
            leave_overflow_to_the_norm(self.zero_optimizer)
            self._take_over(optimizer)
        self._route_calls()

    def adopt_optimizer(self) -> None:
        """Step by the optimizer that a method of the module has made in place of the first, from no states.

        Raises:
            StateError: its groups have other parameters than those of the first.
        """
        found = list(optimizers_of(self.module).values())
        if found == self.optimizers:
            return
        name = type(self.module).__name__
        given = [[id(one) for one in group["params"]] for group in found[0].param_groups] if len(found) == 1 else None
        if given != [[id(one) for one in group] for group in self.groups]:
            raise StateError(
                f"the optimizer of this {name} has other groups of parameters than the one that "
                "on_weights_materialized() made, by which DeepSpeed has laid out its memory; call restart()"
            )
        (new,) = found
        check_kind(new, name)
        for group, before in zip(new.param_groups, self.optimizers[0].param_groups, strict=True):
            group["params"] = before["params"]
        self.optimizer = new
        set_inner_optimizer(self.engine, new)
        self._take_over(new)

    # -------------------------------------------------------------------------------------------- the step

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.release()

    def forward(self, compute: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        rest: list[T] = []

        def first() -> Tensor:
            tensor, other = compute()
            rest.append(other)
            return tensor  # alone: DeepSpeed would hook all tensors of the result

        return self.call(first), rest[0]

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.engine.backward(loss * dist.get_world_size())  # DeepSpeed divides gradients by it

    def step(self, max_norm: float | None, seen: Callable[[Tensor], None]) -> None:
        with self.device.profiler.range("train_batch: clip and optimizer"):
            self.zero_optimizer.clip_grad = max_norm or 0.0
            self._engine_step()
            norm = self.engine.get_global_grad_norm()
            seen(torch.as_tensor(norm, dtype=torch.float32, device=self.device.torch_device))

    def zero(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None
        if self.optimizer is not None:
            self.zero_optimizer.zero_grad()
            forget_gradients(self.zero_optimizer, self.stage)

    def _engine_step(self) -> None:
        self._is_stepping = True
        try:
            self.engine.step()
        finally:
            self._is_stepping = False

    def refresh_masters(self) -> None:
        """Take the weights that the module computes with for those that the optimizer steps."""
        if self.optimizer is not None:
            self.zero_optimizer.refresh_fp32_params()

    @property
    def optimizers(self) -> list[Optimizer]:
        return [] if self.optimizer is None else [self.optimizer]

    @property
    def engine(self) -> ZeroEngine:
        """Return DeepSpeed's engine, which there is if the module has an optimizer or is partitioned."""
        assert self._engine is not None
        return self._engine

    @property
    def zero_optimizer(self) -> Any:
        """Return DeepSpeed's optimizer around that of the module."""
        return self.engine.optimizer

    # --------------------------------------------------------------------------------- the user's own calls

    def call(self, compute: Callable[[], T]) -> T:
        """Return ``compute()``, inside of which the weights of the module's parts are gathered as they are needed."""
        if self._is_inside or self._engine is None:
            return compute()
        if torch.is_grad_enabled():
            self.check_gradients()
        self._is_inside = True
        try:
            return self._engine(compute)
        except BaseException:
            self.abandon()
            raise
        finally:
            self._is_inside = False

    def check_gradients(self) -> None:
        """Raise while the gradients are away, into whose memory a backward would write."""

    def _route_calls(self) -> None:
        """Have ``module(...)`` and ``module.hidden_states(...)`` run inside the engine, whoever calls them."""
        module, cls = self.module, type(self.module)
        hidden_states = module.hidden_states

        def routed(*args: Any, **kwargs: Any) -> Tensor:
            return self.call(lambda: hidden_states(*args, **kwargs))

        module.hidden_states = routed  # type: ignore[method-assign]
        vars(module)[_OWNER] = self
        body = {"__call__": _routed_call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        module.__class__ = type(cls.__name__, (cls,), body)

    def _take_over(self, optimizer: Optimizer) -> None:
        """Have ``optimizer.step()`` and ``zero_grad()`` of the user's methods act on the gradients that ZeRO holds."""
        inner: Any = optimizer.step
        outer: Any = optimizer

        @functools.wraps(inner)  # a scheduler looks for its mark
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._is_stepping:
                return inner(*args, **kwargs)
            if any(one is not None for one in (*args, *kwargs.values())):
                raise UnsupportedError(
                    f"step(closure) of the optimizer of {type(self.module).__name__}",
                    "ZeRO steps once, by gradients that it has; call backward() first, then step() without a closure",
                )
            self.zero_optimizer.clip_grad = 0.0
            self._engine_step()
            self.release()
            return None

        def zero_grad(set_to_none: bool = True) -> None:
            self.zero()

        outer.step, outer.zero_grad = step, zero_grad

    # -------------------------------------------------------------------------------------------- release

    def release(self) -> None:
        if self.stage == 3:
            partition_all(self.engine.optimizer)

    def abandon(self) -> None:
        """Forget an unfinished forward or backward. Nothing is exchanged, as other ranks may have failed elsewhere."""
        self._is_inside = False
        if self._engine is None:
            return
        if self.stage == 3:
            forget_forward(self.engine.optimizer)
        if self.optimizer is not None:
            self.zero()
        self.release()

    def close(self) -> None:
        """Remove DeepSpeed's hooks, which hold the module."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None


def check_kind(optimizer: Optimizer, name: str) -> None:
    """Raise UnsupportedError for an optimizer, of a module of class ``name``, that cannot step flat tensors."""
    for kind, why in _REFUSED.items():
        if isinstance(optimizer, getattr(torch.optim, kind, ())):  # older torch does not have all of them
            raise UnsupportedError(
                f"torch.optim.{kind} as the optimizer of {name}", f"{why}; use another optimizer, or executor='fsdp2'"
            )


def _routed_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    zero: Zero = vars(module)[_OWNER]
    return zero.call(lambda: super(type(module), module).__call__(*args, **kwargs))
