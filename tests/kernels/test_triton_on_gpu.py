"""The Triton implementations on a GPU, against float64: sizes of the issue, extreme logits, how torch may call them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.row_stats import ROW_STATS
from rlcore.ops import combine, entropy_bonus, kl, linear_logprob, linear_loss, ppo_clip, token_logprob
from tests.accuracy import assert_as_accurate, assert_same_bits, assert_within_rounding
from tests.kernels.plain import (
    Scores,
    assert_loss_as_accurate,
    assert_loss_within_rounding,
    assert_scores_as_accurate,
    doubled,
    in_bfloat16,
    linear_scores,
    token_scores,
)
from tests.kernels.test_row_stats import assert_match_float64, whole_numbers

pytestmark = pytest.mark.gpu


@pytest.fixture
def needs_tiles() -> None:
    refusals = dict(choose("linear_loss", Query("cuda", torch.bfloat16, 64, 1000)).refused)
    if "tiled" in refusals:
        pytest.skip(f"tiled refuses: {refusals['tiled']}")


def random_head(T: int, H: int, V: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(T, H, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(V, H, device="cuda") * scale / H**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, V, (T,), device="cuda")
    targets[0], targets[-1] = 0, V - 1
    return hidden, weight, targets


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Scores:
    """In plain torch, with the products of bfloat16 that the device's library has."""
    found = linear_logprob(hidden, weight, targets, bias=bias, with_entropy=True, implementation="chunked")
    assert found.entropy is not None
    return found.logprob, found.entropy


def assert_tiles_as_accurate(
    leaves: Sequence[Tensor], found: tuple[Tensor, Tensor | None], targets: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """As the products of the device's library: its matrix units may cut off where float32 rounds."""

    def of_library(hidden: Tensor, weight: Tensor) -> Scores:
        return chunked(hidden.bfloat16(), weight.bfloat16(), targets, bias)

    formula = functools.partial(linear_scores, targets=targets, bias=bias)
    return assert_scores_as_accurate(found, formula, leaves, reference=of_library)


# ----------------------------------------------------------------------------------------------- from logits


@pytest.mark.parametrize("V", [1, 7, 151936, 152064, 262144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_match_float64(V: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(127, V, device="cuda") * 4).to(dtype)
    logits[1] = (logits[1].float() * 20).clamp(-80, 80)
    logits[2] += 1e4
    logits[3] = -1e4
    targets = torch.randint(0, V, (127,), device="cuda")
    targets[0], targets[4], targets[5] = 0, V - 1, -100
    logits[5] = math.nan
    if V > 1:
        logits[6, ::2], targets[6] = -math.inf, 1
    found = token_logprob(logits.requires_grad_(), targets, with_entropy=True, implementation="triton")
    (got,) = assert_scores_as_accurate(found, functools.partial(token_scores, targets=targets), [logits])
    assert not got[5].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_row_stats_match_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(127, 4097, device="cuda") * 4).to(dtype)
    targets = torch.where(torch.arange(127, device="cuda") % 2 == 0, logits.argmax(1), 3)
    found = token_logprob(logits, targets, temperature=0.8, row_stats=ROW_STATS, implementation="triton").row_stats
    assert_match_float64(found, logits.double() / 0.8, targets)
    hidden, weight, bias = (x.to("cuda", dtype) for x in whole_numbers(127, 64, 301))
    exact = hidden.double() @ weight.double().T + bias.double()
    targets = torch.where(torch.arange(127, device="cuda") % 2 == 0, exact.argmax(1), 3)
    found = linear_logprob(hidden, weight, targets, bias=bias, row_stats=ROW_STATS, implementation="rows").row_stats
    assert_match_float64(found, exact, targets, reach=float(exact.abs().max()))


@pytest.mark.parametrize("T", [1, 65537])
def test_any_number_of_rows_matches_float64(T: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(T, 1000, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(0, 1000, (T,), device="cuda", dtype=torch.int32)
    found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    assert_scores_as_accurate(found, functools.partial(token_scores, targets=targets), [logits])


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
def test_rows_beyond_two_to_the_31_elements(is_transposed: bool) -> None:
    V = 16384
    shape = (V, 2**31 // V + 9) if is_transposed else (2**31 // V + 9, V)
    logits = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    logits = (logits.T if is_transposed else logits).requires_grad_()
    targets = torch.randint(0, V, (len(logits),), device="cuda", dtype=torch.int32)
    found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    (got,) = torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), logits)
    last = slice(-9, None)
    scores, slopes = [[x.detach()[last] for x in found]], [got[last]]
    narrow = logits.detach()[last].clone().requires_grad_()
    for leaf, dtype in ((narrow, torch.float32), (*doubled(narrow), torch.float64)):
        own = token_scores(leaf.to(dtype), targets[last])
        scores.append([x.detach() for x in own])
        slopes.append(torch.autograd.grad(own[0].sum() + own[1].sum(), leaf)[0])
    assert_as_accurate(*scores)
    assert_as_accurate(*slopes)


# --------------------------------------------------------------------------------------- from hidden states


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize(
    ("T", "H", "V"),
    [(1, 64, 151936), (127, 72, 152064), (300, 200, 7), (300, 896, 50257), (65537, 64, 1000)],
    ids=str,
)
@pytest.mark.parametrize("budget", [None, 40 * 2**20], ids=["exponentials", "some exponentials"])
def test_tiles_match_float64(T: int, H: int, V: int, budget: int | None) -> None:
    hidden, weight, targets = random_head(T, H, V)
    if T > 5:
        targets[3] = -100
        hidden.data[3] = math.nan
    found = linear_logprob(
        hidden, weight, targets, with_entropy=True, memory_budget_bytes=budget, implementation="tiled"
    )
    d_hidden, _ = assert_tiles_as_accurate([hidden, weight], found, targets)
    if T > 5:
        assert not d_hidden[3].any()


@pytest.mark.usefixtures("needs_tiles")
def test_tiles_of_one_column_are_certain_but_for_rounding() -> None:
    """The target's logit is summed in another order than in the tile."""
    T, H = 5, 8
    hidden, weight, targets = random_head(T, H, 1)
    found = linear_logprob(hidden, weight, targets, with_entropy=True, implementation="tiled")
    logit = (hidden.detach().double().abs() @ weight.detach().double().abs().T).squeeze(1)  # of absolute values
    rounding: dict[str, Any] = {"terms": 2 * H + 32, "dtype": torch.float32}
    for score in found:
        assert_within_rounding(score, torch.zeros(T, device="cuda"), magnitude=1 + logit, **rounding)
    got = torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), (hidden, weight))
    # Two slopes of 1, each times a probability and a logarithm that are off by as much; then times the other operand.
    off, other = 4 * (1 + logit[:, None]), [weight.detach().double().abs(), hidden.detach().double().abs()]
    for gradient, magnitude in zip(got, (off * other[0], (off * other[1]).sum(0)[None]), strict=True):
        assert_within_rounding(gradient, torch.zeros_like(gradient), magnitude=magnitude, **rounding)


@pytest.mark.usefixtures("needs_tiles")
def test_tiles_are_exact_on_peaked_logits() -> None:
    hidden, weight, targets = random_head(1024, 2048, 151936, scale=16.0)  # |z| up to about 90
    with torch.no_grad():
        targets[::2] = (hidden @ weight.T).argmax(1)[::2]
    narrow = [x.detach() for x in (hidden, weight)]
    wide = [x.double() for x in narrow]
    found = linear_logprob(*narrow, targets, with_entropy=True, implementation="tiled")
    for got, plain, exact in zip(found, chunked(*narrow, targets), chunked(*wide, targets), strict=True):
        assert_as_accurate(got, plain, exact)
    assert bool((found.logprob <= 0).all()) and bool((found.entropy >= 0).all())


def policy_inputs(T: int) -> dict[str, Any]:
    old = torch.randn(T, device="cuda") - 8
    per_token = {"old_logprobs": old, "ref_logprobs": old, "advantages": torch.randn(T, device="cuda")}
    return {"per_token": per_token, "token_weight": torch.full((T,), 1 / T, device="cuda")}


def policy_loss() -> Any:
    return combine(ppo_clip(), kl(coef=0.01), entropy_bonus(coef=0.01))


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize("budget", [None, 30 * 2**20], ids=["one chunk", "chunks"])
def test_a_loss_in_tiles_matches_float64(budget: int | None) -> None:
    hidden, weight, targets = random_head(1000, 264, 50257)
    tokens = policy_inputs(1000)
    bias = torch.randn(50257, device="cuda").requires_grad_()
    options = {"temperature": torch.linspace(0.5, 2, 1000, device="cuda"), "logit_scale": 0.9}
    found = linear_loss(
        hidden, weight, targets, policy_loss(), bias=bias, memory_budget_bytes=budget, implementation="tiled",
        **options, **tokens,
    )  # fmt: skip
    assert_loss_as_accurate(
        found.loss, policy_loss(), [hidden, weight, bias], targets, tokens, rounded=in_bfloat16, **options
    )


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize("budget", [None, 64 * 2**20], ids=["default", "64 MiB"])
@pytest.mark.parametrize(
    ("T", "H", "V"), [(2048, 4096, 152064), (1537, 2048, 151936), (8192, 128, 151936), (1, 64, 262144)], ids=str
)
def test_tiles_of_real_heads_are_as_accurate_as_products_in_float32(T: int, H: int, V: int, budget: int | None) -> None:
    """In chunks of plain torch: several waves of rows, and the last one not whole."""
    hidden, weight, targets = random_head(T, H, V)
    tokens = policy_inputs(T)
    double = {"per_token": {name: x.double() for name, x in tokens["per_token"].items()}}
    double["token_weight"] = tokens["token_weight"].double()

    def results(name: str, inputs: Sequence[Tensor], tokens: Any, budget: int | None) -> tuple[Any, Any, list[Tensor]]:
        options: dict[str, Any] = {"implementation": name, "memory_budget_bytes": budget}
        loss = linear_loss(*inputs, targets, policy_loss(), **tokens, **options).loss
        scores = linear_logprob(*inputs, targets, with_entropy=True, **options)
        total = loss + (scores.logprob + scores.entropy).mean()
        return loss, [x.detach() for x in scores], list(torch.autograd.grad(total, inputs))

    _, *exact = results("chunked", doubled(hidden, weight), double, None)
    loss, *found = results("tiled", (hidden, weight), tokens, budget)
    _, *plain = results("chunked", (hidden, weight), tokens, None)
    if T >= 16:
        assert_as_accurate(found[0], plain[0], exact[0], what="scores")
    for sides in zip(found[1], plain[1], exact[1], strict=True):
        assert_as_accurate(*sides, what="gradient")
    reach = float(hidden.detach().norm(dim=1).max() * weight.detach().norm(dim=1).max())
    assert_loss_within_rounding(loss, policy_loss(), exact[0], targets, tokens, terms=H + V + 32, reach=reach)


@pytest.mark.usefixtures("needs_tiles")
def test_tiles_with_columns_of_minus_infinity() -> None:
    hidden, weight, targets = random_head(300, 64, 1000)
    bias = torch.zeros(1000, device="cuda")
    bias[256:512], bias[600:] = -math.inf, -math.inf  # a whole tile, and the edge
    targets = targets % 256
    found = linear_logprob(hidden, weight, targets, bias=bias, with_entropy=True, implementation="tiled")
    _, d_weight = assert_tiles_as_accurate([hidden, weight], found, targets, bias=bias)
    assert not d_weight[256:512].any() and not d_weight[600:].any()


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize("budget", [None, 2**20], ids=["exponentials kept", "chunks"])
def test_a_loss_in_tiles_can_be_taken_back_twice_and_by_any_factor(budget: int | None) -> None:
    hidden, weight, targets = random_head(1000, 64, 5000)
    targets[7] = -100
    hidden.data[7] = math.nan
    options = {"memory_budget_bytes": budget, "implementation": "tiled"}
    tokens = policy_inputs(1000)
    loss = linear_loss(hidden, weight, targets, policy_loss(), **options, **tokens).loss
    for factor in (1, 1, 3):

        def times(*scores: Tensor, factor: int = factor) -> Any:
            value, stats = policy_loss()(*scores)
            return factor * value, stats

        assert_loss_as_accurate(loss * factor, times, (hidden, weight), targets, tokens, rounded=in_bfloat16)
    (d_hidden,) = torch.autograd.grad(loss, hidden)
    assert not d_hidden[7].any()


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize("H", [1024, 64], ids=["exponentials kept", "chunks"])
def test_a_loss_in_tiles_takes_no_more_than_its_budget_and_the_accumulators(H: int) -> None:
    hidden, weight, targets = random_head(4096, H, 50000)
    tokens, options = policy_inputs(4096), {"memory_budget_bytes": 300 * 2**20, "implementation": "tiled"}

    def run() -> None:
        linear_loss(hidden, weight, targets, policy_loss(), **options, **tokens).loss.backward()
        hidden.grad = weight.grad = None

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    gradients = (hidden.numel() + weight.numel()) * (2 + 4)
    assert torch.cuda.max_memory_allocated() - before <= gradients + options["memory_budget_bytes"] + 16 * 2**20


@pytest.mark.usefixtures("needs_tiles")
def test_tiles_rerun_bit_identically() -> None:
    hidden, weight, targets = random_head(3000, 256, 50257)
    tokens = policy_inputs(3000)

    def run() -> list[Tensor]:
        found = linear_logprob(hidden, weight, targets, with_entropy=True, memory_budget_bytes=100 * 2**20)
        loss = linear_loss(hidden, weight, targets, policy_loss(), memory_budget_bytes=100 * 2**20, **tokens).loss
        gradients = torch.autograd.grad(found.logprob.sum() + found.entropy.sum() + loss, (hidden, weight))
        return [found.logprob, found.entropy, loss, *gradients]

    assert all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))


# ------------------------------------------------------------------------------------------ as torch calls them


def scored(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    found = linear_logprob(hidden, weight, targets, with_entropy=True)
    logits = hidden @ weight.T
    rows = token_logprob(logits, targets, with_entropy=True)
    return (found.logprob + found.entropy + rows.logprob + rows.entropy).sum()


def gradients_of(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*inputs), inputs[:2])


def test_they_run_on_another_stream() -> None:
    inputs = random_head(300, 64, 5000)
    want = gradients_of(scored, *inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = gradients_of(scored, *inputs)
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_they_run_in_a_checkpoint() -> None:
    inputs = random_head(300, 64, 5000)
    got = gradients_of(lambda *xs: checkpoint(scored, *xs, use_reentrant=False), *inputs)
    want = gradients_of(scored, *inputs)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_weight_used_twice_gets_both_gradients() -> None:
    hidden, weight, targets = random_head(300, 64, 5000)
    once, exact = gradients_of(scored, hidden, weight, targets), gradients_of(scored, *doubled(hidden, weight), targets)
    twice = gradients_of(lambda h, w, y: scored(h, w, y) + 2 * scored(h, w, y), hidden, weight, targets)
    assert_as_accurate(twice, [3 * x for x in once], [3 * x for x in exact])


def test_their_forward_is_captured_in_a_graph() -> None:
    hidden, weight, targets = random_head(300, 64, 5000)
    with torch.no_grad():
        scored(hidden, weight, targets)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = scored(hidden, weight, targets)
        hidden.copy_(torch.randn_like(hidden))
        graph.replay()
        want = scored(hidden, weight, targets)
    assert_same_bits(captured, want)  # the same kernels
