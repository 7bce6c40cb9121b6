"""``token_logprob`` and ``linear_logprob`` as ``torch.compile`` sees them: opaque, of known shapes and gradients.

Each is two operators with fake kernels, forward and backward. They check values, choose an implementation and run it
when the compiled code runs, as eager code would. The backward computes logits again, and ``inplace_backward`` is not
used: compiled code keeps and frees tensors by a plan of its own.

Order of this file: small helpers, the calls, what registers the operators of a call, the two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rlcore.errors import UnsupportedError
from rlcore.kernels.autograd.scorer import Scorer, Scores, Upstream
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.linear.problem import HeadInputs, HeadTask, head_task
from rlcore.kernels.operands import check_token_range
from rlcore.kernels.softmax_rows import Logprobs, Rows, wide_dtype
from rlcore.kernels.token.problem import LogitTask, logit_task

_UNCHECKED = Rows(torch.empty(0, device="cpu"), 0, 1.0)
"""For a task that is only asked for its options."""


def split_temperature(temperature: float | Tensor) -> tuple[float, Tensor | None]:
    """A schema has no argument that is a number or a tensor."""
    return (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def graph_break(reason: str) -> Callable[[_Function], _Function]:
    """Marks a function that runs as it is, between two graphs; with ``fullgraph=True`` an error that says why."""

    def mark(function: _Function) -> _Function:
        return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return, no-untyped-call]

    return mark


class _Call(Protocol):
    """Arguments of a forward operator, in the order of its schema; first those that may get gradients."""

    @property
    def targets(self) -> Tensor: ...

    @property
    def with_entropy(self) -> bool: ...

    @property
    def implementation(self) -> str | None: ...

    def query(self) -> Query: ...

    def prepared(self) -> tuple[Sequence[Tensor | None], Any]:
        """The tensors and the task of a scorer, checked."""


class LogitCall(NamedTuple):
    logits: Tensor
    targets: Tensor
    temperature: float
    temperatures: Tensor | None
    """Instead of ``temperature``, one for each target."""
    keep_mask: Tensor | None
    with_entropy: bool
    ignore_index: int
    implementation: str | None

    def query(self) -> Query:
        return LogitTask(_UNCHECKED, self.keep_mask, self.with_entropy).query(self.logits)

    def prepared(self) -> tuple[Sequence[Tensor | None], LogitTask]:
        logits, task = logit_task(
            self.logits,
            self.targets,
            temperature=self.temperature if self.temperatures is None else self.temperatures,
            with_entropy=self.with_entropy,
            ignore_index=self.ignore_index,
            keep_mask=self.keep_mask,
            inplace_backward=False,
        )
        check_token_range(self.targets, self.logits.shape[-1], self.ignore_index)
        return (logits,), task


class HeadCall(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperature: float
    temperatures: Tensor | None
    """Instead of ``temperature``, one for each target."""
    softcap: float | None
    logit_scale: float
    with_entropy: bool
    ignore_index: int
    memory_budget_bytes: int | None
    implementation: str | None

    def query(self) -> Query:
        task = HeadTask(_UNCHECKED, self.softcap, self.with_entropy, self.memory_budget_bytes)
        return task.query(HeadInputs(self.hidden, self.weight, self.bias))

    def prepared(self) -> tuple[Sequence[Tensor | None], HeadTask]:
        inputs = HeadInputs(self.hidden, self.weight, self.bias)
        task = head_task(
            inputs,
            self.targets,
            temperature=self.temperature if self.temperatures is None else self.temperatures,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            with_entropy=self.with_entropy,
            ignore_index=self.ignore_index,
            group=None,
            memory_budget_bytes=self.memory_budget_bytes,
        )
        return inputs, task


class _Operator:
    """The forward and backward operators of a call, registered with torch."""

    def __init__(self, name: str, call: Callable[..., _Call], schema: str, num_tensors: int) -> None:
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
        self._op.register_autograd(self._backward, setup_context=self._keep)

    def __call__(self, call: _Call) -> Logprobs:
        logprob, *others = self._op(*call)  # type: ignore[misc]
        return Logprobs(logprob, others[0] if call.with_entropy else None)

    def _scorer(self, call: _Call) -> Scorer:
        choice = choose(self._name, call.query(), call.implementation)
        if not isinstance(choice.fn, Scorer):
            reason = f"{choice.implementation!r} has no backward of its own, and autograd does not see into operators"
            raise UnsupportedError(f"{self._name} in compiled code", reason)
        return choice.fn

    def _run(self, *arguments: Any) -> list[Tensor]:
        """Log-probability, entropy if asked for, and the residuals."""
        call = self._call(*arguments)
        tensors, task = call.prepared()
        with torch.autocast(call.targets.device.type, enabled=False):
            scores = self._scorer(call).forward(*tensors, task, for_backward=False)
        found = (scores.logprob, scores.entropy, *scores.residuals)
        return [values.reshape(call.targets.shape) for values in found if values is not None]

    def _fake(self, *arguments: Any) -> list[Tensor]:
        call = self._call(*arguments)
        count = 1 + call.with_entropy + self._scorer(call).num_residuals
        dtype = wide_dtype(arguments[0].dtype)
        return [torch.empty(call.targets.shape, dtype=dtype, device=call.targets.device) for _ in range(count)]

    def _run_backward(self, *arguments: Any) -> list[Tensor]:
        """The gradients that are needed."""
        *forward, saved, g_logprob, g_entropy, needs = arguments
        call = self._call(*forward)
        tensors, task = call.prepared()
        shape = task.rows.marked.shape
        logprob, *others = (values.reshape(shape) for values in saved)
        entropy = others.pop(0) if call.with_entropy else None
        upstream = (None if g is None else g.reshape(shape) for g in (g_logprob, g_entropy))
        with torch.autocast(call.targets.device.type, enabled=False):
            gradients = self._scorer(call).backward(
                *tensors,
                task,
                needs=needs,
                scores=Scores(logprob, entropy, tuple(others)),
                upstream=Upstream(*upstream),
            )
        pairs = zip(gradients, forward, strict=False)
        return [gradient.reshape(x.shape).contiguous() for gradient, x in pairs if gradient is not None]

    def _fake_backward(self, *arguments: Any) -> list[Tensor]:
        needed = zip(arguments, arguments[-1], strict=False)
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, is_needed in needed if is_needed]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output)

    def _backward(self, ctx: Any, upstream: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        count, saved = len(ctx.constants), ctx.saved_tensors
        tensors, scores = saved[:count], list(saved[count:])
        arguments = [constant if x is None else x for x, constant in zip(tensors, ctx.constants, strict=True)]
        g_entropy = upstream[1] if self._call(*arguments).with_entropy else None
        needs = list(ctx.needs_input_grad[: self._num_tensors])
        found = iter(self._backward_op(*arguments, scores, upstream[0], g_entropy, needs))
        return tuple(next(found) if needed else None for needed in needs) + (None,) * (count - self._num_tensors)


token_logprob_compiled = _Operator(
    "token_logprob",
    LogitCall,
    "Tensor logits, Tensor targets, float temperature, Tensor? temperatures, Tensor? keep_mask, bool with_entropy, "
    "int ignore_index, str? implementation",
    num_tensors=1,
)
linear_logprob_compiled = _Operator(
    "linear_logprob",
    HeadCall,
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float temperature, Tensor? temperatures, "
    "float? softcap, float logit_scale, bool with_entropy, int ignore_index, int? memory_budget_bytes, "
    "str? implementation",
    num_tensors=3,
)
