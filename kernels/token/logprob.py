"""Log-probability of chosen tokens, and the entropy, from logits.

    s = z / temperature      logprob = s_y - logsumexp(s)      entropy = -sum_v p_v ln p_v,  p = softmax(s)

z are the logits of a row and y is its target. Rows are not shifted: row t scores ``targets[t]``. Gradients: see
``softmax_rows``.

Letters: T rows (leading dimensions may be any, such as [N, L]), V vocabulary.
Order of this file: public operator, reference, chunked implementation, the operator in compiled code. ``triton_rows``
has the implementation in Triton, ``vocab_parallel`` the one over several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.autograd.compiled import CompiledOperator, split_temperature
from rlcore.kernels.autograd.forward_backward import ForwardBackward, Gradients, GradOutput, LogprobOutput
from rlcore.kernels.chunks import batched_row_chunks, rows_per_chunk
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.operands import (
    check_float,
    check_known_tokens,
    check_same_device,
    check_shape,
    check_token_range,
    is_checked_on_device,
    unlowered,
)
from rlcore.kernels.row_stats import checked_row_stats, row_stats_in_order
from rlcore.kernels.softmax_rows import (
    NO_ROWS,
    Logprobs,
    RowStatistics,
    RowStatsBuffer,
    ScaledRows,
    column,
    exponentials_,
    gradient_,
    statistics_,
    wide_dtype,
)
from rlcore.kernels.token.problem import LogitsProblem, logits_problem
from rlcore.kernels.vocab_shard import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def token_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    ignore_index: int = -100,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    group: ProcessGroup | None = None,
    row_stats: Sequence[str] = (),
    implementation: str | None = None,
) -> Logprobs:
    """Return the log-probability of ``targets[t]`` under ``softmax(logits[t] / temperature)``, and the entropy.

    Args:
        logits: [T, V], or [..., V]; float32, bfloat16, float16 or float64; any strides. With ``group`` this rank's
            columns, of any number, in the order of the ranks.
        targets: [T], or [...]; int64 or int32 token ids, or ``ignore_index``.
        temperature: the sampler's; > 0, a float or one for each target.
        with_entropy: also the (differentiable) entropy.
        ignore_index: rows with this target give 0 and get a gradient of exactly 0, whatever their logits
            hold.
        keep_mask: bool, shape of the logits; False where a token could not be sampled (top-p, top-k): it has
            probability 0, also when chosen. See ``rlcore.ops.keep_mask``.
        inplace_backward: the backward may overwrite ``logits``, which must be an intermediate result that
            nothing else reads. Saves nothing where strides do not let the leading dimensions be joined to two.
        group: a process group over which the vocabulary is split. Token ids are those of the whole vocabulary. Every
            rank gets the same results, and a gradient of its own columns for the same gradients of the results.
        row_stats: names of more numbers of each row, found in ``row_stats`` of the result: "sum_squares" (of the
            probabilities), "mean_logit" (of the logits / temperature, over V) and "is_top1" (bool: no logit is above
            the target's, and none before it equals that). They have no gradient.
        implementation: run this one or raise; None chooses.

    Returns:
        ``(logprob, entropy)`` shaped like ``targets``, float32 (float64 for float64 logits), nats, <= 0 and
        >= 0; entropy is None unless asked for. Differentiable in ``logits``. A row whose logits are all -inf has no
        distribution: it gives NaN, and so does its gradient, as with ``torch.log_softmax``.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above.
        UnsupportedError: the implementation asked for refuses.
    """
    check_float("logits", logits)
    check_group(group)
    if logits.dim() < 2 or (logits.shape[-1] == 0 and group is None):
        raise InvalidInputError(f"logits must be [..., T, V] with V > 0; got {list(logits.shape)}")
    check_shape("targets", targets, tuple(logits.shape[:-1]), "one token for each row of logits")
    check_same_device("logits", logits.device, targets=targets, keep_mask=keep_mask)
    _check_keep_mask(keep_mask, logits)
    if inplace_backward:
        _check_overwritable(logits)
    if group is not None:
        from rlcore.kernels.token.vocab_parallel import scores_over_ranks  # it imports torch's compiler

        return scores_over_ranks(
            logits,
            targets,
            group,
            implementation,
            temperature=temperature,
            with_entropy=with_entropy,
            ignore_index=ignore_index,
            keep_mask=keep_mask,
            inplace_backward=inplace_backward,
            row_stats=row_stats,
        )
    if torch.compiler.is_compiling():
        number, tensor = split_temperature(temperature)
        return token_logprob_compiled(
            TokenLogprobCall(
                logits, targets, number, tensor, keep_mask, with_entropy, ignore_index, implementation,
                ",".join(checked_row_stats(row_stats)),
            )
        )  # fmt: skip
    joined, problem = logits_problem(
        logits,
        targets,
        temperature=temperature,
        with_entropy=with_entropy,
        ignore_index=ignore_index,
        keep_mask=keep_mask,
        inplace_backward=inplace_backward,
        row_stats=row_stats,
    )
    run = choose("token_logprob", problem.query(logits), implementation).fn
    is_range_checked_late = is_checked_on_device(targets)  # so that its small kernels do not delay the large ones
    if not is_range_checked_late:
        check_token_range(targets, logits.shape[-1], ignore_index)
    with unlowered(logits.device.type):
        result: Logprobs = run(joined, problem)
    if is_range_checked_late and not (isinstance(run, ForwardBackward) and run.checks_targets):
        check_known_tokens(problem.rows.target, logits.shape[-1])
    return shaped_like(targets, result, problem.row_stats)


def shaped_like(targets: Tensor, result: Logprobs, row_stats: Sequence[str] = ()) -> Logprobs:
    """Return scores of joined rows, and the ``row_stats`` asked for, in the shape of the targets."""
    numbers = row_stats_in_order(result.row_stats, row_stats) if row_stats else []
    if targets.dim() == result.logprob.dim():
        return result
    shaped = Logprobs(*(None if x is None else x.view(targets.shape) for x in result))  # type: ignore[arg-type]
    if not numbers:
        return shaped
    return shaped.with_row_stats({name: x.view(targets.shape) for name, x in zip(row_stats, numbers, strict=True)})


def _check_keep_mask(keep_mask: Tensor | None, logits: Tensor) -> None:
    if keep_mask is None:
        return
    if keep_mask.dtype != torch.bool:
        raise InvalidInputError(f"keep_mask must be bool, True where a token may be sampled; got {keep_mask.dtype}")
    check_shape("keep_mask", keep_mask, tuple(logits.shape), "like the logits")


def _check_overwritable(logits: Tensor) -> None:
    if logits.requires_grad and logits.is_leaf:
        raise InvalidInputError(
            "inplace_backward=True would overwrite logits, a leaf tensor whose values its owner keeps; "
            "pass an intermediate result, or inplace_backward=False"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise InvalidInputError(
            f"inplace_backward=True needs logits whose elements do not share memory; got strides {logits.stride()}"
        )


def token_logprob_reference(logits: Tensor, problem: LogitsProblem) -> Logprobs:
    """Compute the definition. ``inplace_backward`` is a permission that it does not use."""
    rows = problem.rows
    logits = logits.to(wide_dtype(logits.dtype)).masked_fill(rows.ignored[..., None], 0.0)
    if problem.keep_mask is not None:
        logits = logits.masked_fill(~(problem.keep_mask | rows.ignored[..., None]), -math.inf)
    centred = logits - logits.amax(-1, keepdim=True).detach()  # changes nothing, and keeps float32 exact
    logprobs = (centred * column(rows.inverse_temperature)).log_softmax(-1)
    logprob = rows.zero_ignored(logprobs.gather(-1, rows.target[..., None]).squeeze(-1))
    entropy = None
    if problem.with_entropy:
        finite = logprobs.masked_fill(logprobs == -math.inf, 0.0)  # p ln p is 0 where p is
        entropy = -rows.zero_ignored((logprobs.exp() * finite).sum(-1))
    scaled = logits.detach() * column(rows.inverse_temperature)
    definitions = {
        "sum_squares": lambda: logprobs.detach().exp().square().sum(-1),
        "mean_logit": lambda: scaled.mean(-1),
        "is_top1": lambda: logits.argmax(-1) == rows.target,
    }
    found = {name: definitions[name]().masked_fill(rows.ignored, 0) for name in problem.row_stats}
    return Logprobs(logprob, entropy).with_row_stats(found)


def _forward(logits: Tensor, problem: LogitsProblem, *, for_backward: bool) -> LogprobOutput:
    """Save four numbers a row; the backward computes the probabilities again."""
    shape, wide = logits.shape[:-1], wide_dtype(logits.dtype)
    logprob, peak, total = (logits.new_empty(shape, dtype=wide) for _ in range(3))
    entropy = logits.new_empty(shape, dtype=wide) if problem.with_entropy else None
    numbers = RowStatsBuffer(problem.row_stats, logprob)
    for index, chunk_TV, rows in wide_chunks(logits, problem):
        found = statistics_(chunk_TV, rows, with_entropy=problem.with_entropy, row_stats=problem.row_stats)
        numbers.write(index, found.row_stats)
        logprob[index], peak[index], total[index] = found.logprob, found.peak, found.total
        if entropy is not None and found.entropy is not None:
            entropy[index] = found.entropy
    for values in (logprob, entropy):
        if values is not None:
            values.masked_fill_(problem.rows.ignored, 0.0)
    return LogprobOutput(logprob, entropy, (peak, total), row_stats=numbers.result(problem.rows))


def recomputing_backward(
    logits: Tensor,
    problem: LogitsProblem,
    *,
    needs: Sequence[bool],
    output: LogprobOutput,
    grad_output: GradOutput,
) -> Gradients:
    """Compute the gradient from the peak and the total of each row."""
    saved = (output.logprob, output.entropy, *output.residuals)
    g_logprob, g_entropy = (problem.rows.zero_ignored(g) for g in grad_output)
    gradient = logits.detach() if problem.inplace_backward else torch.empty_like(logits)
    for index, chunk_TV, rows in wide_chunks(logits, problem):
        statistics = RowStatistics(*(_at(values, index) for values in saved))
        exp_TV = exponentials_(chunk_TV, statistics.peak, rows.inverse_temperature)
        gradient_TV = gradient_(exp_TV, rows, statistics, _at(g_logprob, index), _at(g_entropy, index))
        if problem.keep_mask is not None:
            # A target outside the mask has no gradient in its own column either.
            gradient_TV.masked_fill_(~problem.keep_mask[index], 0.0)
        gradient[index] = gradient_TV
    return (gradient,)


def wide_chunks(logits: Tensor, problem: LogitsProblem) -> Iterator[tuple[Any, Tensor, ScaledRows]]:
    """Yield the index of each chunk, a wide copy of its logits, and its rows."""
    wide = wide_dtype(logits.dtype)
    shape = logits.shape[:-1]
    for index in batched_row_chunks(shape, rows_per_chunk(shape.numel(), logits.shape[-1], wide.itemsize, None)):
        rows = problem.rows.at(index)
        chunk_TV = rows.zero_ignored_rows(logits[index].to(wide))
        if problem.keep_mask is not None:
            chunk_TV.masked_fill_(~(problem.keep_mask[index] | rows.ignored[:, None]), -math.inf)
        yield index, chunk_TV, rows


def _at(values: Tensor | None, index: Any) -> Any:
    return None if values is None else values[index]


token_logprob_chunked = ForwardBackward(_forward, recomputing_backward, num_residuals=2)
"""Plain torch in chunks of rows: neither forward nor backward makes a float32 copy of all logits."""


class TokenLogprobCall(NamedTuple):
    """The arguments of the operator in compiled code."""

    logits: Tensor
    targets: Tensor
    temperature: float
    temperatures: Tensor | None
    """One for each target; None: ``temperature`` is that of all."""
    keep_mask: Tensor | None
    with_entropy: bool
    ignore_index: int
    implementation: str | None
    row_names: str = ""
    """The names of ``row_stats`` with commas between them: autograd would want a gradient for each entry of a list."""

    @property
    def row_stats(self) -> tuple[str, ...]:
        return tuple(name for name in self.row_names.split(",") if name)

    def query(self) -> Query:
        problem = LogitsProblem(NO_ROWS, self.keep_mask, self.with_entropy, row_stats=self.row_stats)
        return problem.query(self.logits)

    def prepared(self) -> tuple[Sequence[Tensor | None], LogitsProblem]:
        logits, problem = logits_problem(
            self.logits,
            self.targets,
            temperature=self.temperature if self.temperatures is None else self.temperatures,
            with_entropy=self.with_entropy,
            ignore_index=self.ignore_index,
            keep_mask=self.keep_mask,
            inplace_backward=False,
            row_stats=self.row_stats,
        )
        check_token_range(self.targets, self.logits.shape[-1], self.ignore_index)
        return (logits,), problem


token_logprob_compiled = CompiledOperator(
    "token_logprob",
    TokenLogprobCall,
    "Tensor logits, Tensor targets, float temperature, Tensor? temperatures, Tensor? keep_mask, bool with_entropy, "
    "int ignore_index, str? implementation, str row_names",
    num_tensors=1,
)
