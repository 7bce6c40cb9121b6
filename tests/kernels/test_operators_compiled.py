"""Operators inside torch.compile. Graphs run as traced ("aot_eager"): what code they become is Inductor's matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.linear.logprob import LinearLogprobCall
from rlcore.kernels.token.logprob import TokenLogprobCall
from rlcore.ops import linear_logprob, linear_loss, token_logprob
from tests.accuracy import assert_as_accurate
from tests.kernels.plain import assert_equal_in_float64, doubled
from tests.warm import run_warm

T, H, V = 24, 8, 50


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def random_inputs(num_rows: int = T, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    options: dict[str, Any] = {"generator": generator, "dtype": dtype, "requires_grad": True}
    hidden, weight, bias = (torch.randn(shape, **options) for shape in ((num_rows, H), (V, H), (V,)))
    targets = torch.randint(0, V, (num_rows,), generator=generator)
    targets[1] = -100
    return hidden, weight, bias, targets


def combined(scores: tuple[Tensor, Tensor | None]) -> Tensor:
    logprob, entropy = scores
    slope = torch.arange(logprob.numel(), dtype=logprob.dtype).view(logprob.shape) / T - 1
    return (slope * logprob).sum() + (0 if entropy is None else (slope.cos() * entropy).sum())


def from_hidden(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return combined(linear_logprob(hidden, weight, targets, bias=bias, **options))


def from_logits(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, **options: Any) -> Tensor:
    logits = (hidden @ weight.T + bias).view(2, -1, V)
    return combined(token_logprob(logits, targets.view(2, -1), **options))


def run(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    value = function(*inputs)
    asked = [x for x in inputs if x.requires_grad]
    return [value, *torch.autograd.grad(value, asked)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """A graph may be cut into other operations."""
    assert_equal_in_float64(found, expected, terms=T + V)


def assert_as_accurate_as_eager(
    found: list[Tensor], function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    """In float32: a scalar in float64 Dynamo may compile twice."""
    *leaves, targets = inputs
    assert_as_accurate(found, run(function, *inputs), run(function, *doubled(*leaves), targets))


TEMPERATURES = torch.linspace(0.5, 2, T, dtype=torch.float64)
OPTIONS: list[Any] = [
    pytest.param(from_hidden, {}, marks=pytest.mark.slow),
    (from_hidden, {"with_entropy": True, "temperature": 0.7, "softcap": 4.0, "logit_scale": 1.1}),
    pytest.param(
        from_hidden,
        {"with_entropy": True, "temperature": TEMPERATURES, "memory_budget_bytes": 5 * V * 24},
        marks=pytest.mark.slow,
    ),
    pytest.param(from_logits, {"with_entropy": True, "temperature": 0.7}, marks=pytest.mark.slow),
    (from_logits, {"temperature": TEMPERATURES.view(2, -1), "inplace_backward": True}),
]


@pytest.mark.parametrize("function, options", OPTIONS)
def test_a_full_graph_gives_what_eager_code_gives(function: Callable[..., Tensor], options: dict[str, Any]) -> None:
    def scored(*inputs: Tensor) -> Tensor:
        return function(*inputs, **options).sin()

    inputs = random_inputs()
    found = run(torch.compile(scored, fullgraph=True, backend="aot_eager"), *inputs)
    assert_same(found, run(scored, *inputs))


@pytest.mark.parametrize(
    "frozen", [*(pytest.param(x, marks=pytest.mark.slow) for x in (0, 1, 2, (0, 1, 2))), (0, 1)], ids=str
)
def test_only_the_gradients_asked_for_are_computed(frozen: int | tuple[int, ...]) -> None:
    inputs = random_inputs()
    for index in (frozen,) if isinstance(frozen, int) else frozen:
        inputs[index].requires_grad_(False)
    scored = torch.compile(from_hidden, fullgraph=True, backend="aot_eager")
    if not any(x.requires_grad for x in inputs):
        assert not scored(*inputs).requires_grad
        return
    assert_same(run(scored, *inputs), run(from_hidden, *inputs))


def test_two_graphs_serve_any_number_of_tokens() -> None:
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    scored = torch.compile(from_hidden, fullgraph=True, backend=graphs)
    for num_rows in (24, 30, 8, 11):
        inputs = random_inputs(num_rows)
        assert_same(run(scored, *inputs), run(from_hidden, *inputs))
    assert graphs.frame_count == 2  # of the first number, and of any


def test_under_autocast_the_graph_lowers_what_eager_code_lowers() -> None:
    inputs = random_inputs(dtype=torch.float32)

    def scored(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return from_hidden(*inputs)

    found = run(torch.compile(scored, fullgraph=True, backend="aot_eager"), *inputs)
    assert all(torch.equal(got, want) for got, want in zip(found, run(scored, *inputs), strict=True))


def test_values_are_checked_when_the_graph_runs() -> None:
    hidden, weight, bias, targets = random_inputs()
    scored = torch.compile(from_hidden, fullgraph=True, backend="aot_eager")
    scored(hidden, weight, bias, targets)
    targets[5] = V
    with pytest.raises(InvalidInputError, match=r"targets must be token ids in \[0, 50\) .* got 50 at \[5\]"):
        scored(hidden, weight, bias, targets)


def test_an_implementation_without_a_backward_of_its_own_is_refused() -> None:
    scored = torch.compile(lambda *xs: from_hidden(*xs, implementation="reference"), backend="aot_eager")
    with pytest.raises(UnsupportedError, match="'reference' has no backward of its own"):
        scored(*random_inputs())


@pytest.mark.parametrize(
    "needs", [(True, True), *(pytest.param(x, marks=pytest.mark.slow) for x in ((True, False), (False, True)))], ids=str
)
def test_the_operators_keep_the_promises_of_their_fake_kernels(needs: tuple[bool, bool]) -> None:
    hidden, weight, bias, targets = random_inputs(dtype=torch.float32)
    hidden.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    temperatures = torch.linspace(0.5, 2, T)
    head = LinearLogprobCall(hidden, weight, bias, targets, 1.0, temperatures, 4.0, 1.0, True, -100, None, None)
    torch.library.opcheck(torch.ops.rlcore.linear_logprob.default, tuple(head))
    logits = (hidden @ weight.T).detach().requires_grad_(needs[0])
    call = TokenLogprobCall(logits, targets, 0.7, None, logits > 0, True, -100, None)
    torch.library.opcheck(torch.ops.rlcore.token_logprob.default, tuple(call))


# ------------------------------------------------------------------------------------------------- linear_loss


def cross_entropy(logprob: Tensor, entropy: Tensor, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return per_token["a"] * -logprob - 0.1 * entropy, {"entropy_max": entropy}


def model_and_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, loss_fn: Any = cross_entropy
) -> Tensor:
    a, ones = torch.linspace(0, 1, len(targets)).to(hidden), torch.ones(len(targets)).to(hidden)
    output = linear_loss(
        hidden.tanh(), weight, targets, loss_fn, per_token={"a": a}, token_weight=ones, bias=bias * 2.0
    )
    return output.loss * 3 + output.stats["entropy_max"]


# torch looks at .grad of whatever passes a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_linear_loss_is_one_graph_break() -> None:
    inputs = random_inputs(dtype=torch.float32)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found = run(torch.compile(model_and_loss, backend=graphs), *inputs)
    assert_as_accurate_as_eager(found, model_and_loss, inputs)
    assert graphs.frame_count == 2  # what comes before, and what comes after


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_split_vocabulary_is_one_graph_break(one_rank: dist.ProcessGroup) -> None:
    def scored(*inputs: Tensor) -> Tensor:
        return from_hidden(inputs[0].tanh(), *inputs[1:], group=one_rank).sin()

    inputs = random_inputs(dtype=torch.float32)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found = run(torch.compile(scored, backend=graphs), *inputs)
    assert_as_accurate_as_eager(found, scored, inputs)
    assert graphs.frame_count == 3  # what comes before, the rest of from_hidden, the rest of scored
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear_logprob with group= exchanges statistics"):
        torch.compile(scored, fullgraph=True, backend="aot_eager")(*inputs)


def test_linear_loss_in_a_full_graph_is_refused_with_what_to_do() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile loss_fn instead: torch\.compile\(loss_fn\)"):
        torch.compile(model_and_loss, fullgraph=True, backend="aot_eager")(*random_inputs())


def test_a_compiled_loss_function_is_compiled_inside_linear_loss() -> None:
    inputs = random_inputs()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    loss_fn = torch.compile(cross_entropy, fullgraph=True, backend=graphs)
    found = run(lambda *xs: model_and_loss(*xs, loss_fn=loss_fn), *inputs)
    assert_same(found, run(model_and_loss, *inputs))
    assert graphs.frame_count >= 1


@pytest.mark.parametrize(
    "chosen",
    [
        (test_linear_loss_is_one_graph_break, test_linear_loss_in_a_full_graph_is_refused_with_what_to_do),
        pytest.param((test_a_split_vocabulary_is_one_graph_break,), marks=pytest.mark.slow),
    ],
    ids=["heads", "ranks"],
)
def test_graphs_break_alike_where_the_operators_were_imported_before_the_compiler(chosen: tuple[Any, ...]) -> None:
    """In this file's own process the compiler comes first."""
    result = run_warm(
        "import sys, pytest\n"
        "import rlcore.kernels.linear.loss, rlcore.kernels.token.vocab_parallel\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        f"chosen = {[f'{__file__}::{test.__name__}' for test in chosen]}\n"
        "sys.exit(pytest.main(['-q', '--assert=plain', '-p', 'no:cacheprovider', *chosen]))",
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0 and f"{len(chosen)} passed" in result.stdout, result.stdout + result.stderr
