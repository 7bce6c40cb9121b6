"""Training as plain PyTorch does it: one forward over the whole batch, autograd, the optimizer's own step.

In float64 it is what an engine must come to. In the engine's own dtype it says how near: see `tests.accuracy`. No
engine, no launcher, no shards and no micro-batches are in it.

Letters: T packed tokens, R of them scored, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.accuracy import AS_ACCURATE, assert_as_accurate, assert_parts_as_accurate, rounding

from .plain_sampling import restricted

SMALLEST = 16
"""Log-probabilities that are compared at once: the error of fewer is a matter of luck."""


class Step(NamedTuple):
    """The inputs of one step, on the host in float64."""

    tokens: dict[str, Tensor]
    """[R] each: what the metric of that name is the mean, the largest or the smallest of; "loss" is their sum."""
    weight_R: Tensor
    gradient: Tensor
    """Of all parameters, before it is clipped."""
    largest: int
    """Elements of the largest parameter."""


class PlainTraining:
    """A module on its own, with the optimizer that its ``on_weights_materialized`` makes."""

    def __init__(self, module: Any, dtype: torch.dtype, device: str = "cpu") -> None:
        self.module = module.to(device, dtype)
        if dtype == torch.float64:
            keep_float64(module)
        module.on_weights_materialized()

    def step(
        self,
        batch: Mapping[str, Tensor],
        loss_fn: Callable[..., Any],
        *,
        weight_T: Tensor | None = None,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
    ) -> Step:
        """Take the step of ``train_batch`` on a packed batch with a ``loss_mask``; without weights, the token mean."""
        module = self.module
        mask_T, per_token = batch["loss_mask"], _per_token(batch)
        logprob_RV = (self._logits(batch) / temperature).log_softmax(-1)
        entropy_R = -(logprob_RV.exp() * logprob_RV).sum(-1)
        logprob_R = logprob_RV.gather(1, batch["input_ids"][mask_T][:, None].to(logprob_RV.device))[:, 0]
        weight_R = per_token["loss_mask"] / mask_T.sum() if weight_T is None else weight_T[mask_T]
        moved = {name: entry.to(logprob_R) for name, entry in per_token.items()}
        value_R, statistics = loss_fn(logprob_R, entropy_R, moved)
        (weight_R.to(value_R) * value_R).sum().backward()
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        gradient = torch.cat([one.double().cpu().flatten() for one in gradients])
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        module.optimizer.step()
        module.zero_grad()
        if hasattr(module, "scheduler"):
            module.scheduler.step()
        tokens = {"loss": value_R, "entropy_mean": entropy_R} | statistics
        return Step(
            {name: entry.detach().double().cpu() for name, entry in tokens.items()},
            weight_R.double(),
            gradient,
            max(one.numel() for one in gradients),
        )

    def logprobs(self, batch: Mapping[str, Tensor], **sampling: Any) -> Tensor:
        """[T] as ``forward_logprobs``: 0 where nothing is scored."""
        mask_T = batch["loss_mask"]
        with torch.no_grad():
            logprob_RV = restricted(self._logits(batch), **sampling).cpu()
        logprob_R = logprob_RV.gather(1, batch["input_ids"][mask_T][:, None])[:, 0]
        return torch.zeros(mask_T.shape, dtype=logprob_R.dtype).masked_scatter(mask_T, logprob_R)

    def weights(self, **options: Any) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.named_weights(**options)}

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """[R, V] by which the tokens that are trained on are scored."""
        head = self.module.output_head()
        tokens = {"input_ids": batch["input_ids"].to(head.weight.device), "cu_seqlens": batch["cu_seqlens"]}
        hidden_TH = self.module.hidden_states(tokens)
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)  # of logits: an engine keeps them so in any dtype
        scoring_RH = hidden_TH[batch["loss_mask"].nonzero()[:, 0].to(hidden_TH.device) - 1].to(wide)
        bias = None if head.bias is None else head.bias.to(wide)
        return torch.nn.functional.linear(scoring_RH, head.weight.to(wide), bias)


class Truth:
    """The same training in float64, and in ``dtype`` on ``device``.

    Args:
        make: gives the module with its weights, each time another.
    """

    def __init__(self, make: Callable[[], Any], dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.exact = PlainTraining(make(), torch.float64)
        self.reference = PlainTraining(make(), dtype, device)
        self._is_tf32 = dtype == torch.float32 and device != "cpu"

    def assert_step(self, found: Mapping[str, float], *arguments: Any, **options: Any) -> None:
        """The metrics of ``train_batch`` are those of this step; see `PlainTraining.step`."""
        assert_metrics(found, *self.step(*arguments, **options))

    def step(self, *arguments: Any, **options: Any) -> tuple[Step, Step]:
        """The reference's, and the exact one."""
        reference, exact = self.both(lambda plain: plain.step(*arguments, **options))
        return reference, exact

    def assert_logprobs(self, found_T: Tensor, batch: Mapping[str, Tensor], **options: Any) -> None:
        reference_T, exact_T = self.both(lambda plain: plain.logprobs(batch, **options))
        mask_T = batch["loss_mask"]
        assert (found_T[~mask_T] == 0).all() and int(exact_T[mask_T].isfinite().sum()) >= SMALLEST
        assert_as_accurate(found_T[mask_T], reference_T[mask_T], exact_T[mask_T], what="log-probabilities")

    def assert_weights(self, found: Mapping[str, Tensor], **options: Any) -> None:
        reference, exact = self.reference.weights(**options), self.exact.weights(**options)
        assert_parts_as_accurate(found, reference, exact)

    def both(self, take: Callable[[PlainTraining], Any]) -> tuple[Any, Any]:
        """Return the result of the reference, and of the exact one."""
        with products_in_tf32(self._is_tf32):
            return take(self.reference), take(self.exact)


@contextmanager
def products_in_tf32(are_allowed: bool = True) -> Iterator[None]:
    """Let a reference on a GPU multiply float32 in TF32, as kernels of an engine may."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = are_allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def assert_metrics(found: Mapping[str, float], reference: Step, exact: Step) -> None:
    """Each is off by no more than four times the errors of the reference's tokens allow, of whatever sign they are,
    and the roundings of the sum over tokens. An evaluation has no norm of gradients."""
    allowed = _allowed(reference, exact)
    names = {name for name in found if not name.startswith(("lr/", "num_", "mismatch/", "expert_load/"))}
    assert allowed.keys() - names <= {"grad_norm"} and names <= allowed.keys()
    for name in names:
        value, off, size = allowed[name]
        limit = AS_ACCURATE * off + size
        assert abs(found[name] - value) <= limit, f"{name} is {found[name]:.9g}, expected {value:.9g} up to {limit:.2g}"


def _allowed(reference: Step, exact: Step) -> dict[str, tuple[float, float, float]]:
    """Return for each metric its true value, the reference's error, and what rounding adds."""
    norm, apart = exact.gradient.norm(), (reference.gradient - exact.gradient).norm()
    allowed = {"grad_norm": (norm, apart, rounding(exact.largest) * norm)}
    for name, value_R in exact.tokens.items():
        off_R, size_R = (reference.tokens[name] - value_R).abs(), value_R.abs()
        if name.endswith(("_max", "_min")):
            value = value_R.max() if name.endswith("_max") else value_R.min()
            relative_R = off_R / size_R.clamp(min=torch.finfo(torch.float32).tiny)
            # which token is the largest is known, and how exactly the reference has just that one is a matter of luck
            allowed[name] = value, relative_R.max() * value.abs(), rounding(1) * value.abs()
        else:
            share_R = exact.weight_R / (1 if name == "loss" else exact.weight_R.sum())
            allowed[name] = share_R @ value_R, share_R @ off_R, rounding(2 * len(share_R)) * (share_R @ size_R)
    return {name: (float(value), float(off), float(size)) for name, (value, off, size) in allowed.items()}


def _per_token(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries that loss functions read, [R] each; an entry of a sequence is repeated for its tokens."""
    mask_T, lengths_N = batch["loss_mask"], batch["cu_seqlens"].diff()
    entries = {name: entry for name, entry in batch.items() if name not in ("input_ids", "cu_seqlens")}
    return {
        name: (entry if len(entry) == len(mask_T) else entry.repeat_interleave(lengths_N))[mask_T]
        for name, entry in entries.items()
    }


def keep_float64(module: Any) -> Any:
    """The module; norms of transformers would compute in float32, whatever they are given, and some experts not at all.

    Routers and tables of positions stay in float32: what that adds is of the size of the reference's own error.
    """
    if getattr(module, "_can_set_experts_implementation", bool)():
        module.set_experts_implementation("eager")
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = partial(_rms_norm, part)
    return module


def _rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    is_gemma = hasattr(norm, "eps")  # it adds 1 to its weight
    weight, epsilon = (1 + norm.weight, norm.eps) if is_gemma else (norm.weight, norm.variance_epsilon)
    scale: Tensor = weight * (hidden.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return scale * hidden
