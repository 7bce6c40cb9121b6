"""``token_logprob`` of logits whose vocabulary is split over several ranks.

test_heads_on_ranks.py runs this file once for each rank, in processes that meet at a file; pytest does not collect it
by itself. Every rank runs every test, in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.row_stats import ROW_STATS
from rlcore.ops import token_logprob
from tests.accuracy import assert_as_accurate
from tests.kernels.plain import assert_equal_in_float64
from tests.kernels.ranks import CUTS, DEVICE, RANK, SIZE, V, group, world  # noqa: F401  # a fixture

N, L = 3, 24


def random_logits(dtype: torch.dtype) -> Tensor:
    """[N, L, V], the same on every rank."""
    return (torch.randn(N, L, V, generator=torch.Generator().manual_seed(0)) * 4).to(DEVICE, dtype)


def random_targets() -> Tensor:
    targets = torch.randint(0, V, (N, L), generator=torch.Generator().manual_seed(1))
    targets[0, :3] = torch.tensor([0, V - 1, -100])
    return targets.to(DEVICE)


def random_mask() -> Tensor:
    """bool [N, L, V] with some targets outside, and rows in which the first rank keeps nothing."""
    mask = torch.rand(N, L, V, generator=torch.Generator().manual_seed(2)).to(DEVICE) > 0.3
    mask[1, :, : CUTS[0][1]] = False
    mask[1, :, -1] = True
    return mask


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "with_entropy": True},
    {"temperature": torch.linspace(0.5, 2, N * L, dtype=torch.float64, device=DEVICE).view(N, L), "with_entropy": True},
    {"keep_mask": random_mask(), "with_entropy": True},
    {"inplace_backward": True, "with_entropy": True},
]


def results(logits: Tensor, targets: Tensor, columns: slice, **options: Any) -> list[Tensor]:
    """Return the scores, and the gradient of ``columns`` of the logits."""
    leaf = logits.detach().requires_grad_()
    found = token_logprob(leaf * 1, targets, **options)
    slope = torch.linspace(-1, 2, targets.numel(), dtype=found.logprob.dtype, device=DEVICE).view(targets.shape)
    is_there = found.logprob.isfinite()
    total = (slope * found.logprob)[is_there].sum()
    if found.entropy is not None:
        total = total + (slope.cos() * found.entropy)[is_there].sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return [*(x for x in found if x is not None), gradient[..., columns]]


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WAYS = list(zip(["plain", "entropy", "temperatures", "mask", "in place"], OPTIONS, strict=True))


@pytest.mark.parametrize(  # every two of a cut, a way and a dtype once
    ("cuts", "options", "dtype"),
    [
        pytest.param(cuts, options, dtype, id=f"{cuts}-{way}-{dtype}")
        for column, cuts in enumerate(CUTS)
        for row, (way, options) in enumerate(WAYS)
        for dtype in [DTYPES[(column + row) % 3]]
    ],
)
def test_scores_and_gradients_are_those_of_one_process(
    cuts: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    logits, targets, own = random_logits(dtype), random_targets(), slice(cuts[RANK], cuts[RANK + 1])
    logits[0, 2] = math.nan  # an ignored row
    here = dict(options)
    if "keep_mask" in here:
        here["keep_mask"] = here["keep_mask"][..., own]
    found = results(logits[..., own], targets, slice(None), group=group(), **here)
    want = results(logits, targets, own, implementation="chunked", **options)
    assert not found[0][0, 2] and not found[-1][0, 2].any()
    if dtype == torch.float64:
        assert_equal_in_float64(found, want, terms=N * L + V)
        return
    exact = results(logits.double(), targets, own, implementation="reference", **options)
    assert [x.shape for x in found] == [x.shape for x in want]
    for sides in zip(found, want, exact, strict=True):
        if sides[0].numel():  # a rank without columns has no gradient to compare
            assert_as_accurate(*sides)


def test_shapes_that_do_not_flatten_and_ones_without_rows() -> None:
    logits, targets, own = random_logits(torch.float64), random_targets(), slice(CUTS[0][RANK], CUTS[0][RANK + 1])
    want = results(logits[:, :-1], targets[:, 1:], own, with_entropy=True)
    found = results(logits[..., own][:, :-1], targets[:, 1:], slice(None), with_entropy=True, group=group())
    assert_equal_in_float64(found, want, terms=N * L + V)
    nothing = logits[..., own].reshape(-1, own.stop - own.start)[:0].requires_grad_()
    scores = token_logprob(nothing, targets.flatten()[:0], with_entropy=True, group=group())
    (scores.logprob.sum() + scores.entropy.sum()).backward()
    assert scores.logprob.shape == (0,) and nothing.grad is not None


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("options", OPTIONS[:3], ids=["plain", "entropy", "temperatures"])
def test_row_stats_are_those_of_one_process(cuts: tuple[int, ...], options: dict[str, Any]) -> None:
    whole, targets, own = random_logits(torch.float64).round(), random_targets(), slice(cuts[RANK], cuts[RANK + 1])
    whole[..., 5] = whole[..., -1] = 50.0  # the largest, often of two ranks: the first counts
    kind = torch.arange(L, device=DEVICE) % 3
    targets = torch.where(targets < 0, targets, torch.where(kind == 0, 5, torch.where(kind == 1, V - 1, targets)))
    leaf = whole[..., own].requires_grad_()
    found = token_logprob(leaf, targets, group=group(), row_stats=ROW_STATS, **options).row_stats
    want = token_logprob(whole, targets, implementation="reference", row_stats=ROW_STATS, **options).row_stats
    assert torch.equal(found["is_top1"], want["is_top1"]) and 0 < int(want["is_top1"].sum()) < targets.numel()
    for name in ("sum_squares", "mean_logit"):
        assert_equal_in_float64(found[name], want[name], terms=V, what=name)
    assert not any(values.requires_grad for values in found.values())


def test_the_results_are_the_same_bits_on_every_rank() -> None:
    own = slice(CUTS[0][RANK], CUTS[0][RANK + 1])
    found = token_logprob(random_logits(torch.float32)[..., own], random_targets(), with_entropy=True, group=group())
    for values in found:
        of_all = [torch.empty_like(values) for _ in range(SIZE)]
        dist.all_gather(of_all, values)
        assert all(torch.equal(values, other) for other in of_all)


def test_what_does_not_fit_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    logits, targets = random_logits(torch.float32)[0, :, CUTS[0][RANK] : CUTS[0][RANK + 1]], random_targets()[1]
    wrong = targets.clone()
    wrong[7] = V
    with pytest.raises(InvalidInputError, match=rf"targets must be token ids in \[0, {V}\) .* got {V} at \[7\]"):
        token_logprob(logits, wrong, group=group())
    with pytest.raises(InvalidInputError, match="ranks of group must score the same rows; they have"):
        token_logprob(logits[RANK:], targets[RANK:], group=group())
    with pytest.raises(InvalidInputError, match=r"logits must be \[..., T, V\] with V > 0 on some rank of group"):
        token_logprob(logits[:, :0], targets, group=group())
    with pytest.raises(InvalidInputError, match=r"group must be a torch.distributed.ProcessGroup .*; got int"):
        token_logprob(logits, targets, group=3)
    with pytest.raises(UnsupportedError, match="chunked: it needs the whole vocabulary on one rank; gather it and"):
        token_logprob(logits, targets, group=group(), implementation="chunked")
    with pytest.raises(UnsupportedError, match="vocab_parallel: it is for a vocabulary split over the ranks of group="):
        token_logprob(random_logits(torch.float32), random_targets(), implementation="vocab_parallel")
