"""The Triton implementations on a GPU, against float64: sizes of the issue, extreme logits, how torch may call them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.kernels.dispatch import Query, choose
from rlcore.ops import combine, entropy_bonus, kl, linear_logprob, linear_loss, ppo_clip, token_logprob

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


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


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
    g, g_bar = torch.randn(2, 127, device="cuda")
    narrow, wide = logits.requires_grad_(), logits.detach().double().requires_grad_()
    found = token_logprob(narrow, targets, with_entropy=True, implementation="triton")
    want = token_logprob(wide, targets, with_entropy=True, implementation="reference")
    torch.testing.assert_close(found.logprob.double(), want.logprob, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), want.entropy, rtol=1e-4, atol=1e-5)
    (got,) = torch.autograd.grad([found.logprob, found.entropy], narrow, [g, g_bar])
    (truth,) = torch.autograd.grad([want.logprob, want.entropy], wide, [g.double(), g_bar.double()])
    torch.testing.assert_close(got.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert not got[5].any()


@pytest.mark.parametrize("T", [1, 65537])
def test_any_number_of_rows_matches_float64(T: int) -> None:
    torch.manual_seed(0)
    narrow = torch.randn(T, 1000, device="cuda").bfloat16().requires_grad_()
    wide = narrow.detach().double().requires_grad_()
    targets = torch.randint(0, 1000, (T,), device="cuda", dtype=torch.int32)
    found = token_logprob(narrow, targets, with_entropy=True, implementation="triton")
    want = token_logprob(wide, targets, with_entropy=True, implementation="reference")
    torch.testing.assert_close(found.logprob.double(), want.logprob, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), want.entropy, rtol=1e-4, atol=1e-5)
    (got,) = torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), narrow)
    (truth,) = torch.autograd.grad(want.logprob.sum() + want.entropy.sum(), wide)
    torch.testing.assert_close(got.double(), truth, rtol=2**-7, atol=1e-6)


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
    wide = logits.detach()[last].double().requires_grad_()
    want = token_logprob(wide, targets[last], with_entropy=True, implementation="reference")
    (truth,) = torch.autograd.grad(want.logprob.sum() + want.entropy.sum(), wide)
    torch.testing.assert_close(found.logprob[last].double(), want.logprob, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got[last].double(), truth, rtol=2**-7, atol=1e-6)


# --------------------------------------------------------------------------------------- from hidden states


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize(
    ("T", "H", "V"),
    [(1, 64, 151936), (127, 72, 152064), (300, 200, 7), (5, 8, 1), (300, 896, 50257), (65537, 64, 1000)],
    ids=str,
)
@pytest.mark.parametrize("budget", [None, 40 * 2**20], ids=["exponentials", "some exponentials"])
def test_tiles_match_float64(T: int, H: int, V: int, budget: int | None) -> None:
    hidden, weight, targets = random_head(T, H, V)
    if T > 5:
        targets[3] = -100
        hidden.data[3] = math.nan
    g, g_bar = torch.randn(2, T, device="cuda")
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    found = linear_logprob(
        hidden, weight, targets, with_entropy=True, memory_budget_bytes=budget, implementation="tiled"
    )
    want = linear_logprob(*wide, targets, with_entropy=True, implementation="reference")
    torch.testing.assert_close(found.logprob.double(), want.logprob, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.entropy.double(), want.entropy, rtol=1e-4, atol=2e-6)
    got = torch.autograd.grad([found.logprob, found.entropy], (hidden, weight), [g, g_bar])
    truth = torch.autograd.grad([want.logprob, want.entropy], wide, [g.double(), g_bar.double()])
    for gradient, true in zip(got, truth, strict=True):
        assert gradient.isfinite().all()
        # With V = 1 nothing depends on the logits.
        assert relative_error(gradient, true) < 2.6e-3 if V > 1 else gradient.abs().max() < 1e-4
    if T > 5:
        assert not got[0][3].any()


@pytest.mark.usefixtures("needs_tiles")
def test_tiles_are_exact_on_peaked_logits() -> None:
    hidden, weight, targets = random_head(1024, 2048, 151936, scale=16.0)  # |z| up to about 90
    with torch.no_grad():
        targets[::2] = (hidden @ weight.T).argmax(1)[::2]
    narrow = [x.detach() for x in (hidden, weight)]
    wide = [x.double() for x in narrow]
    found = linear_logprob(*narrow, targets, with_entropy=True, implementation="tiled")
    want = linear_logprob(*wide, targets, with_entropy=True, implementation="reference")
    assert float((found.logprob - want.logprob).abs().max()) < 1e-3
    assert float((found.entropy - want.entropy).abs().max()) < 1e-4
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
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    found = linear_loss(
        hidden, weight, targets, policy_loss(), bias=bias, memory_budget_bytes=budget, implementation="tiled",
        **options, **tokens,
    )  # fmt: skip
    want = linear_loss(*wide[:2], targets, policy_loss(), bias=wide[2], implementation="reference", **options, **tokens)
    torch.testing.assert_close(found.loss.double(), want.loss, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(found.loss, (hidden, weight, bias))
    for gradient, true in zip(got, torch.autograd.grad(want.loss, wide), strict=True):
        assert relative_error(gradient, true) < 2.6e-3


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize("budget", [None, 64 * 2**20], ids=["default", "64 MiB"])
@pytest.mark.parametrize(
    ("T", "H", "V"), [(2048, 4096, 152064), (1537, 2048, 151936), (8192, 128, 151936), (1, 64, 262144)], ids=str
)
def test_tiles_of_real_heads_match_products_in_float32(T: int, H: int, V: int, budget: int | None) -> None:
    """By the row kernels, whose logits are float32: several waves of rows, and the last one not whole."""
    hidden, weight, targets = random_head(T, H, V)
    tokens, runs = policy_inputs(T), []
    for name in ("tiled", "rows"):
        options = {"implementation": name, "memory_budget_bytes": budget}
        loss = linear_loss(hidden, weight, targets, policy_loss(), **tokens, **options).loss
        found = linear_logprob(hidden, weight, targets, with_entropy=True, **options)
        total = loss + (found.logprob + found.entropy).mean()
        runs.append((total, *torch.autograd.grad(total, (hidden, weight))))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-5, atol=1e-5)
    for got, want in zip(runs[0][1:], runs[1][1:], strict=True):
        assert relative_error(got, want.double()) < 4e-3


@pytest.mark.usefixtures("needs_tiles")
def test_tiles_with_columns_of_minus_infinity() -> None:
    hidden, weight, targets = random_head(300, 64, 1000)
    bias = torch.zeros(1000, device="cuda")
    bias[256:512], bias[600:] = -math.inf, -math.inf  # a whole tile, and the edge
    targets = targets % 256
    found = linear_logprob(hidden, weight, targets, bias=bias, with_entropy=True, implementation="tiled")
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = linear_logprob(*wide, targets, bias=bias.double(), with_entropy=True, implementation="reference")
    torch.testing.assert_close(found.logprob.double(), want.logprob, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.entropy.double(), want.entropy, rtol=1e-4, atol=2e-6)
    got = torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), (hidden, weight))
    truth = torch.autograd.grad(want.logprob.sum() + want.entropy.sum(), wide)
    assert all(relative_error(one, true) < 2.6e-3 for one, true in zip(got, truth, strict=True))
    assert not got[1][256:512].any() and not got[1][600:].any()


@pytest.mark.usefixtures("needs_tiles")
@pytest.mark.parametrize("budget", [None, 2**20], ids=["exponentials kept", "chunks"])
def test_a_loss_in_tiles_can_be_taken_back_twice_and_by_any_factor(budget: int | None) -> None:
    hidden, weight, targets = random_head(1000, 64, 5000)
    targets[7] = -100
    hidden.data[7] = math.nan
    options = {"memory_budget_bytes": budget, "implementation": "tiled"}
    loss = linear_loss(hidden, weight, targets, policy_loss(), **options, **policy_inputs(1000)).loss
    first, again, triple = (torch.autograd.grad(loss * k, (hidden, weight), retain_graph=True) for k in (1, 1, 3))
    for one, other, three in zip(first, again, triple, strict=True):
        assert relative_error(other, one.double()) < 4e-3
        assert relative_error(three, 3 * one.double()) < 4e-3
    assert not first[0][7].any()


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
    once = gradients_of(scored, hidden, weight, targets)
    twice = gradients_of(lambda h, w, y: scored(h, w, y) + 2 * scored(h, w, y), hidden, weight, targets)
    for one, three in zip(once, twice, strict=True):
        assert relative_error(three, 3 * one.double()) < 1e-2


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
    torch.testing.assert_close(captured, want, rtol=0, atol=0)
