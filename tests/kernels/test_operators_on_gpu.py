"""Behaviour that only an accelerator shows: products that widen, no waiting for the device, memory, checks on it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.errors import InvalidInputError
from rlcore.kernels.linear.head import LinearHead
from rlcore.ops import (
    combine,
    entropy_bonus,
    keep_mask,
    kl,
    linear_logprob,
    linear_loss,
    ppo_clip,
    token_logprob,
    token_loss,
)
from tests.accuracy import assert_as_accurate, assert_same_bits, assert_within_rounding, rounding
from tests.kernels.plain import (
    assert_loss_as_accurate,
    assert_loss_within_rounding,
    assert_scores_as_accurate,
    doubled,
    in_bfloat16,
    linear_scores,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any synchronisation with the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is new
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def random_inputs(T: int, H: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(1)
    hidden = torch.randn(T, H, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(V, H, device="cuda") / H**0.5 * 2).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (T,), device="cuda")
    old = torch.randn(T, device="cuda") - 10
    per_token = {"old_logprobs": old, "ref_logprobs": old, "advantages": torch.randn(T, device="cuda")}
    return hidden, weight, targets, {"per_token": per_token, "token_weight": torch.full((T,), 1 / T, device="cuda")}


def policy_loss() -> Any:
    return combine(ppo_clip(), kl(coef=0.01), entropy_bonus(coef=0.01))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_match_float64(dtype: torch.dtype) -> None:
    hidden, weight, targets, tokens = random_inputs(300, 100, 5003, dtype)
    leaves = [hidden, weight]
    rounded = in_bfloat16 if dtype == torch.bfloat16 else None
    found, formula = (
        linear_logprob(*leaves, targets, with_entropy=True),
        functools.partial(linear_scores, targets=targets),
    )
    assert_scores_as_accurate(found, formula, leaves, reference=functools.partial(formula, rounded=rounded))
    loss = linear_loss(*leaves, targets, policy_loss(), **tokens).loss
    assert_loss_as_accurate(loss, policy_loss(), leaves, targets, tokens, rounded=rounded)


def test_bfloat16_products_are_not_widened_by_a_copy_of_the_weight() -> None:
    weight = torch.randn(32, 16, device="cuda", dtype=torch.bfloat16)
    head = LinearHead(weight, None, None)
    assert head.weight_VH.data_ptr() == weight.data_ptr()
    logits = head.logits(torch.randn(8, 16, device="cuda", dtype=torch.bfloat16))
    assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute of a Tensor")
def test_a_loss_of_log_probabilities_waits_for_nothing(is_compiled: bool, request: pytest.FixtureRequest) -> None:
    *_, tokens = random_inputs(2**21, 1, 2, torch.float32)

    def evaluated(logprob: Tensor, entropy: Tensor, tokens: dict[str, Any]) -> tuple[Tensor, ...]:
        loss, stats = token_loss(logprob, policy_loss(), entropy=entropy, **tokens)
        return loss, *stats.values()

    run = torch.compile(evaluated, fullgraph=True) if is_compiled else evaluated
    old = tokens["per_token"]["old_logprobs"]
    leaves = [(old + 0.01).requires_grad_(), (-old).requires_grad_()]
    for _ in range(2):  # what is built and compiled at the first call may wait
        found = run(*leaves, tokens)
        gradients = torch.autograd.grad(found[0], leaves)
        request.getfixturevalue("no_waiting")
    torch.cuda.set_sync_debug_mode("default")
    wide = doubled(*leaves)
    entries = {name: x.double() for name, x in tokens["per_token"].items()}
    double = {"per_token": entries, "token_weight": tokens["token_weight"].double()}
    plain, exact = evaluated(*leaves, tokens), evaluated(*wide, double)
    sides = gradients, torch.autograd.grad(plain[0], leaves), torch.autograd.grad(exact[0], wide)
    assert_as_accurate(*sides)
    targets, largest = torch.zeros_like(old, dtype=torch.int64), float(old.abs().max())
    assert_loss_within_rounding(found[0], policy_loss(), wide, targets, tokens, terms=32, reach=largest)
    # A statistic is a mean of numbers of one sign, each off by some roundings of a log-probability times the ratio.
    each = rounding(32) * (1 + float((leaves[0].detach() - old).exp().max())) * (2 + largest)
    for got, expected in zip(found[1:], exact[1:], strict=True):
        magnitude = expected.abs() + each / rounding(len(old))
        assert_within_rounding(got, expected, terms=len(old), magnitude=magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    hidden, weight, targets, tokens = random_inputs(300, 64, 1000, dtype)

    def run() -> None:
        loss, _ = linear_loss(hidden, weight, targets, policy_loss(), **tokens)
        found = linear_logprob(hidden, weight, targets, with_entropy=True)
        logits = hidden @ weight.T
        keep = keep_mask(logits, temperature=1.0, top_p=0.9, top_k=50)
        scored = token_logprob(logits, targets, with_entropy=True, keep_mask=keep)
        (loss + found.logprob.mean() + scored.entropy.mean()).backward()

    run()  # the first call may ask the device what it can do
    request.getfixturevalue("no_waiting")
    run()


def test_reruns_are_bit_identical() -> None:
    hidden, weight, targets, tokens = random_inputs(1000, 256, 20000, torch.bfloat16)
    runs = []
    for _ in range(2):
        loss = linear_loss(hidden, weight, targets, policy_loss(), **tokens).loss
        runs.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_temporaries_stay_within_the_budget() -> None:
    hidden, weight, targets, tokens = random_inputs(4096, 256, 50000, torch.bfloat16)
    budget = 100 * 2**20

    def run() -> Tensor:
        return linear_loss(hidden, weight, targets, policy_loss(), memory_budget_bytes=budget, **tokens).loss

    run()  # torch keeps 32 MiB for cuBLAS from the first product on; without a budget this loss begins with none
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = run()
    gradients = (hidden.numel() + weight.numel()) * (2 + 4)  # and their accumulators
    assert torch.cuda.max_memory_allocated() - before <= gradients + budget + 8 * 2**20
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before <= gradients + budget + 8 * 2**20


@pytest.mark.parametrize("budget", [2**25, 2**27], ids=["32 MiB", "128 MiB"])
def test_scores_and_what_is_kept_for_their_gradients_stay_within_the_budget(budget: int) -> None:
    hidden, weight, targets, _ = random_inputs(32768, 64, 50000, torch.bfloat16)  # statistics of all tiles: 73 MiB

    def peak(*, with_gradients: bool) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(with_gradients):
            found = linear_logprob(hidden, weight, targets, with_entropy=True, memory_budget_bytes=budget)
        if with_gradients:
            torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), (hidden, weight))
        return torch.cuda.max_memory_allocated() - before

    peak(with_gradients=True)  # the workspace of cuBLAS
    rows = hidden.nbytes + 40 * len(hidden)  # a copy without the ignored ones, and vectors
    gradients = (hidden.numel() + weight.numel()) * (2 + 4)  # and their accumulators
    assert peak(with_gradients=False) <= budget + rows + 2**20
    assert peak(with_gradients=True) <= budget + rows + gradients + 2**20


def test_bad_values_are_named_under_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    with pytest.raises(InvalidInputError, match=r"targets must be token ids in \[0, 5\) .* got 9 at \[1\]"):
        token_logprob(torch.zeros(2, 5, device="cuda"), torch.tensor([0, 9], device="cuda"))


def test_bad_values_stop_the_process_on_the_device(run_python: Any) -> None:
    result = run_python(
        "import torch; from rlcore.ops import token_logprob\n"
        "token_logprob(torch.zeros(2, 5, device='cuda'), torch.tensor([0, 9], device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    assert result.returncode != 0
    assert "RLCORE_DEBUG=1 shows which" in result.stdout + result.stderr


@pytest.mark.parametrize("value", [0.0, float("nan")], ids=["zero", "nan"])
def test_bad_temperatures_are_named_under_debug_and_stop_the_process_otherwise(
    value: float, monkeypatch: pytest.MonkeyPatch, run_python: Any
) -> None:
    result = run_python(
        "import torch; from rlcore.ops import linear_logprob\n"
        "hidden, weight = torch.zeros(2, 8, device='cuda'), torch.zeros(5, 8, device='cuda')\n"
        f"temperature = torch.tensor([1.0, float('{value}')], device='cuda')\n"
        "linear_logprob(hidden, weight, torch.zeros(2, dtype=torch.long, device='cuda'), temperature=temperature)\n"
        "torch.cuda.synchronize()"
    )
    assert result.returncode != 0 and "RLCORE_DEBUG=1 shows which" in result.stdout + result.stderr
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    hidden, weight, targets, _ = random_inputs(2, 8, 5, torch.float32)
    temperature = torch.tensor([1.0, value], device="cuda")
    with pytest.raises(InvalidInputError, match=rf"temperature must be finite and > 0; got {value:g} at \[1\]"):
        linear_logprob(hidden, weight, targets, temperature=temperature)


# ------------------------------------------------------------------------------------------ as torch calls them


def everything(hidden: Tensor, weight: Tensor, targets: Tensor, tokens: dict[str, Any]) -> Tensor:
    loss, _ = linear_loss(hidden, weight, targets, policy_loss(), **tokens)
    return loss + from_both_ends(hidden, weight, targets)


def from_both_ends(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    found = linear_logprob(hidden, weight, targets, with_entropy=True)
    rows = token_logprob(hidden @ weight.T, targets, with_entropy=True)
    return (found.logprob + found.entropy + rows.logprob + rows.entropy).mean()


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_inside_an_activation_checkpoint(use_reentrant: bool) -> None:
    hidden, weight, targets, tokens = random_inputs(300, 64, 5000, torch.bfloat16)
    want = torch.autograd.grad(everything(hidden, weight, targets, tokens), (hidden, weight))
    checkpoint(everything, hidden, weight, targets, tokens, use_reentrant=use_reentrant).backward()
    assert torch.equal(hidden.grad, want[0]) and torch.equal(weight.grad, want[1])


def test_on_another_stream() -> None:
    hidden, weight, targets, tokens = random_inputs(300, 64, 5000, torch.bfloat16)
    want = torch.autograd.grad(everything(hidden, weight, targets, tokens), (hidden, weight))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = torch.autograd.grad(everything(hidden, weight, targets, tokens), (hidden, weight))
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_forward_and_backward_are_captured_in_a_graph(dtype: torch.dtype) -> None:
    hidden, weight, targets, tokens = random_inputs(300, 64, 5000, dtype)

    def run() -> list[Tensor]:
        value = everything(hidden, weight, targets, tokens)
        return [value, *torch.autograd.grad(value, (hidden, weight))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled and cuBLAS is set up before the capture
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    for got, want in zip(captured, run(), strict=True):
        assert_same_bits(got, want)  # the same kernels


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it imports inductor
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # inductor's first, to get its memory pool
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_calls_what_eager_code_calls(mode: str) -> None:
    hidden, weight, targets, _ = random_inputs(300, 64, 5000, torch.bfloat16)
    compiled = torch.compile(from_both_ends, fullgraph=True, mode=mode)
    want = torch.autograd.grad(from_both_ends(hidden, weight, targets), (hidden, weight))
    wide = doubled(hidden, weight)
    exact = torch.autograd.grad(from_both_ends(*wide, targets), wide)
    for _ in range(3):  # "reduce-overhead" warms up, captures, replays
        got = [x.clone() for x in torch.autograd.grad(compiled(hidden, weight, targets), (hidden, weight))]
    assert_as_accurate(got, want, exact)
