"""A log-probability operator as ``torch.compile`` sees it: opaque, with known shapes and gradients.

Each is two operators with fake kernels, forward and backward. They check values, choose an implementation and run it
when the compiled code runs, as eager code would. The backward computes the logits again, and ``inplace_backward`` is
not used: compiled code decides by itself which tensors it keeps and when it frees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from rlcore.errors import UnsupportedError
from rlcore.kernels._torch_private import is_compiler_loaded
from rlcore.kernels.autograd.forward_backward import ForwardBackward, GradOutput, LogprobOutput
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.row_stats import row_stats_dtype, row_stats_in_order
from rlcore.kernels.softmax_rows import Logprobs, wide_dtype


def split_temperature(temperature: float | Tensor) -> tuple[float, Tensor | None]:
    """Return a number and a tensor or None: an operator's schema has no argument that may be either."""
    return (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)


_Function = TypeVar("_Function", bound=Callable[..., Any])


GRAPH_BREAKS: dict[str, Callable[..., Any]] = {}
"""The functions that were decorated before torch's compiler was loaded, by reason: see ``uncompiled``."""


def graph_break(reason: str) -> Callable[[_Function], _Function]:
    """Decorate a function that is not compiled. It runs between two graphs; ``fullgraph=True`` raises ``reason``.

    Without compiled code in the process it is called as it is: ``torch.compiler.disable`` would load the compiler.
    """

    def decorate(function: _Function) -> _Function:
        if is_compiler_loaded():
            return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return, no-untyped-call]
        GRAPH_BREAKS[reason] = function

        @functools.wraps(function)
        def between_graphs(*args: Any, **options: Any) -> Any:
            if not is_compiler_loaded():
                return function(*args, **options)
            # An import runs as it is while this is traced; a call that makes the function would be traced, too.
            from rlcore.kernels.autograd.uncompiled import UNCOMPILED

            return UNCOMPILED[reason](*args, **options)

        return cast("_Function", between_graphs)

    return decorate


class OperatorCall(Protocol):
    """A NamedTuple of a forward operator's arguments in the order of its schema; first those that may get gradients."""

    @property
    def targets(self) -> Tensor: ...

    @property
    def with_entropy(self) -> bool: ...

    @property
    def row_stats(self) -> Sequence[str]: ...

    @property
    def implementation(self) -> str | None: ...

    def query(self) -> Query: ...

    def prepared(self) -> tuple[Sequence[Tensor | None], Any]:
        """Check the arguments; return the tensors and the problem that a ``ForwardBackward`` takes."""


class CompiledOperator:
    """The forward and backward operators of a call, registered with torch."""

    def __init__(self, name: str, call: Callable[..., OperatorCall], schema: str, num_tensors: int) -> None:
        """Register them.

        Args:
            name: the operator's public name.
            call: the class of its arguments.
            schema: of the arguments, in torch's notation.
            num_tensors: the first arguments, so many, may get gradients.
        """
        self._name, self._call, self._num_tensors = name, call, num_tensors
        make = torch.library.custom_op
        self._backward_op = make(
            f"rlcore::{name}_backward",
            self._run_backward,
            mutates_args=(),
            schema=f"({schema}, Tensor[] scores, Tensor? g_logprob, Tensor? g_entropy, bool[] needs) -> Tensor[]",
        )
        self._backward_op.register_fake(self._fake_backward)
        self._op = make(f"rlcore::{name}", self._run, mutates_args=(), schema=f"({schema}) -> Tensor[]")
        self._op.register_fake(self._fake)
        self._op.register_autograd(self._backward, setup_context=self._save)

    def __call__(self, call: OperatorCall) -> Logprobs:
        logprob, *others = self._op(*call)  # type: ignore[misc]
        found = Logprobs(logprob, others[0] if call.with_entropy else None)
        if not call.row_stats:
            return found
        numbers = [x.detach() for x in others[-len(call.row_stats) :]]
        return found.with_row_stats(dict(zip(call.row_stats, numbers, strict=True)))

    def _implementation(self, call: OperatorCall) -> ForwardBackward:
        choice = choose(self._name, call.query(), call.implementation)
        if not isinstance(choice.fn, ForwardBackward):
            reason = f"{choice.implementation!r} has no backward of its own, and autograd does not see into operators"
            raise UnsupportedError(f"{self._name} in compiled code", reason)
        return choice.fn

    def _run(self, *arguments: Any) -> list[Tensor]:
        """Return the log-probability, the entropy if asked for, the residuals, and the row_stats asked for."""
        call = self._call(*arguments)
        tensors, problem = call.prepared()
        with torch.autocast(call.targets.device.type, enabled=False):
            output = self._implementation(call).forward(*tensors, problem, for_backward=False)
        numbers = row_stats_in_order(output.row_stats, call.row_stats)
        found = (output.logprob, output.entropy, *output.residuals, *numbers)
        return [values.reshape(call.targets.shape) for values in found if values is not None]

    def _fake(self, *arguments: Any) -> list[Tensor]:
        call = self._call(*arguments)
        count = 1 + call.with_entropy + self._implementation(call).num_residuals
        wide = wide_dtype(arguments[0].dtype)
        dtypes = [wide] * count + [row_stats_dtype(name, wide) for name in call.row_stats]
        return [torch.empty(call.targets.shape, dtype=dtype, device=call.targets.device) for dtype in dtypes]

    def _run_backward(self, *arguments: Any) -> list[Tensor]:
        """Return the gradients that are needed."""
        *forward, saved, g_logprob, g_entropy, needs = arguments
        call = self._call(*forward)
        tensors, problem = call.prepared()
        shape = problem.rows.labels.shape
        logprob, *others = (values.reshape(shape) for values in saved)
        entropy = others.pop(0) if call.with_entropy else None
        residuals = others[: len(others) - len(call.row_stats)]
        grad_output = (None if g is None else g.reshape(shape) for g in (g_logprob, g_entropy))
        with torch.autocast(call.targets.device.type, enabled=False):
            gradients = self._implementation(call).backward(
                *tensors,
                problem,
                needs=needs,
                output=LogprobOutput(logprob, entropy, tuple(residuals)),
                grad_output=GradOutput(*grad_output),
            )
        pairs = zip(gradients, forward, strict=False)
        return [gradient.reshape(x.shape).contiguous() for gradient, x in pairs if gradient is not None]

    def _fake_backward(self, *arguments: Any) -> list[Tensor]:
        needed = zip(arguments, arguments[-1], strict=False)
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, is_needed in needed if is_needed]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output)

    def _backward(self, ctx: Any, grad_output: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        count, saved = len(ctx.constants), ctx.saved_tensors
        tensors, output = saved[:count], list(saved[count:])
        arguments = [constant if x is None else x for x, constant in zip(tensors, ctx.constants, strict=True)]
        g_entropy = grad_output[1] if self._call(*arguments).with_entropy else None
        needs = list(ctx.needs_input_grad[: self._num_tensors])
        found = iter(self._backward_op(*arguments, output, grad_output[0], g_entropy, needs))
        return tuple(next(found) if needed else None for needed in needs) + (None,) * (count - self._num_tensors)
