"""A loss of log-probabilities alone: what linear_loss says of the same, in one pass when compiled."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import (
    LossOutput,
    combine,
    entropy_bonus,
    gmpo,
    gspo,
    kl,
    linear_logprob,
    linear_loss,
    ppo_clip,
    sequence_level,
    sequence_mask,
    tis,
    token_loss,
)
from tests.accuracy import assert_as_accurate, assert_same_bits
from tests.kernels.plain import assert_equal_in_float64

H, V = 8, 50
EDGES = [0, 5, 5, 17]


def inductor(test: Any) -> Any:
    """Torch's own compiler warns of what torch itself does."""
    test = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute of a Tensor")(test)
    return pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")(
        pytest.mark.slow(test)
    )


@pytest.fixture(autouse=True)
def _nothing_compiled_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    # Inductor's files on disk do not say for which instruction set they are.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def penalised(term: Any) -> Any:
    return combine(term, kl(coef=0.1), entropy_bonus(coef=0.1))


def random_tokens(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Log-probabilities and entropies, and what goes with them; every fifth token does not count."""
    generator = torch.Generator().manual_seed(num_tokens)
    logprob, entropy, old, ref, rollout, advantages = torch.randn(6, num_tokens, generator=generator, dtype=dtype)
    entries = {"old_logprobs": old, "ref_logprobs": ref, "rollout_logprobs": rollout, "advantages": advantages}
    weight = torch.rand(num_tokens, generator=generator, dtype=dtype)
    weight[::5] = 0
    return logprob.requires_grad_(), entropy.requires_grad_(), {"per_token": entries, "token_weight": weight}


def results(
    function: Callable[..., LossOutput], logprob: Tensor, entropy: Tensor, tokens: Mapping[str, Any]
) -> list[Tensor]:
    loss, stats = function(logprob, entropy, **tokens)
    return [loss.detach(), *torch.autograd.grad(loss, (logprob, entropy)), *stats.values()]


def of(loss_fn: Any) -> Callable[..., LossOutput]:
    def evaluated(logprob: Tensor, entropy: Tensor, **tokens: Any) -> LossOutput:
        return token_loss(logprob, loss_fn, entropy=entropy, **tokens)

    return evaluated


@pytest.mark.parametrize(
    "term", [ppo_clip(dual_clip=2.0), gspo(), gmpo(), sequence_mask(tis(ppo_clip()), low=0.1, high=5.0)]
)
def test_it_is_the_loss_of_linear_loss_for_the_log_probabilities_of_linear_logprob(term: Any) -> None:
    _, _, tokens = random_tokens(EDGES[-1], torch.float64)
    tokens["cu_seqlens"] = torch.tensor(EDGES)
    torch.manual_seed(0)
    leaves = [torch.randn(rows, H, dtype=torch.float64, requires_grad=True) for rows in (EDGES[-1], V)]
    targets = torch.randint(0, V, (EDGES[-1],))
    scores = linear_logprob(*leaves, targets, with_entropy=True)
    found, want = of(penalised(term))(*scores, **tokens), linear_loss(*leaves, targets, penalised(term), **tokens)
    assert found.stats.keys() == want.stats.keys()
    for got, expected in [
        (found.loss, want.loss),
        *zip(torch.autograd.grad(found.loss, leaves), torch.autograd.grad(want.loss, leaves), strict=True),
        *((found.stats[name], want.stats[name]) for name in want.stats),
    ]:
        assert_equal_in_float64(got, expected, terms=EDGES[-1] + V)


def test_a_statistic_is_of_the_tokens_that_count_also_where_others_would_be_infinite() -> None:
    """Tokens that do not count hold 0 in every entry."""

    def loss_fn(logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]) -> Any:
        return -logprob * per_token["advantages"], {"log_mean": per_token["advantages"].log()}

    logprob, _, tokens = random_tokens(40, torch.float64)
    weight, advantages = tokens["token_weight"], torch.rand(40, dtype=torch.float64) + 0.5
    _, stats = token_loss(logprob, loss_fn, per_token={"advantages": advantages}, token_weight=weight)
    assert_equal_in_float64(stats["log_mean"], (advantages.log() * weight).sum() / weight.sum(), terms=40)


@pytest.mark.parametrize("backend", ["none", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_token_of_weight_zero_contributes_nothing_even_if_it_holds_nan(backend: str) -> None:
    logprob, entropy, tokens = random_tokens(40)
    run = of(penalised(ppo_clip())) if backend == "none" else torch.compile(of(penalised(ppo_clip())), backend=backend)
    want = results(run, logprob, entropy, tokens)
    is_out = tokens["token_weight"] == 0
    dirty = [x.detach().masked_fill(is_out, float("nan")).requires_grad_() for x in (logprob, entropy)]
    entries = {name: x.masked_fill(is_out, float("nan")) for name, x in tokens["per_token"].items()}
    found = results(run, *dirty, tokens | {"per_token": entries})
    assert not any(bool(x[is_out].any()) for x in found[1:3])
    for got, expected in zip(found, want, strict=True):
        assert_same_bits(got, expected)  # the same operations: what is masked counts as zeros


def test_a_loss_that_writes_into_what_it_is_given_leaves_the_callers_data_alone() -> None:
    @sequence_level
    def writing(logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]) -> Any:
        assert not any(bool(per_token[name][is_out].any()) for name in entries)
        for values in per_token.values():
            values.zero_()
        return logprob, {}

    logprob, entropy, tokens = random_tokens(EDGES[-1], torch.float64)
    is_out, is_even = tokens["token_weight"] == 0, torch.arange(EDGES[-1]) % 2 == 0
    entries = {"int": torch.arange(EDGES[-1]) + 1, "bool": is_even, "float": torch.ones(EDGES[-1], 2)}
    tokens |= {"per_token": entries, "cu_seqlens": torch.tensor(EDGES)}
    kept = {name: values.clone() for name, values in [*entries.items(), ("cu_seqlens", tokens["cu_seqlens"])]}
    leaves = torch.randn(EDGES[-1], H, dtype=torch.float64, requires_grad=True), torch.randn(V, H, dtype=torch.float64)
    targets = torch.zeros(EDGES[-1], dtype=torch.int64)
    for found, scored in [
        (of(writing)(logprob, entropy, **tokens), logprob),
        (linear_loss(*leaves, targets, writing, **tokens), linear_logprob(*leaves, targets).logprob),
    ]:
        assert_equal_in_float64(found.loss, (scored * tokens["token_weight"]).sum(), terms=EDGES[-1] + V)
    for name, values in [*entries.items(), ("cu_seqlens", tokens["cu_seqlens"])]:
        assert torch.equal(values, kept[name]), name


def test_without_an_entropy_none_is_passed_and_none_reported() -> None:
    logprob, _, tokens = random_tokens(10)
    loss, stats = token_loss(logprob, ppo_clip(), **tokens)
    assert loss.requires_grad and "entropy_mean" not in stats
    with pytest.raises(InvalidInputError, match="entropy_bonus needs the entropy"):
        token_loss(logprob, entropy_bonus(coef=0.1), **tokens)


def test_of_no_token_the_loss_is_a_differentiable_zero() -> None:
    logprob, entropy, tokens = random_tokens(0)
    loss, *gradients = results(of(penalised(ppo_clip())), logprob, entropy, tokens)[:3]
    assert loss == 0 and [x.shape for x in gradients] == [(0,), (0,)]


def test_half_precision_is_widened_before_anything_is_computed() -> None:
    logprob, entropy, tokens = random_tokens(20)
    half = [x.detach().bfloat16().requires_grad_() for x in (logprob, entropy)]
    wide = [x.detach().float().requires_grad_() for x in half]
    found, want = (results(of(penalised(ppo_clip())), *pair, tokens) for pair in (half, wide))
    assert found[0].dtype == torch.float32 and torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1].bfloat16())


def with_a_term_made_inside(logprob: Tensor, entropy: Tensor, **tokens: Any) -> LossOutput:
    return token_loss(logprob, combine(ppo_clip(), entropy_bonus(coef=0.1)), entropy=entropy, **tokens)


@pytest.mark.parametrize(
    "evaluated",
    [
        pytest.param(with_a_term_made_inside, id="tokens"),
        pytest.param(of(penalised(ppo_clip(dual_clip=2.0))), id="penalised tokens", marks=pytest.mark.slow),
        pytest.param(of(penalised(gspo())), id="sequences", marks=pytest.mark.slow),
    ],
)
def test_one_graph_without_a_break_serves_any_number_of_tokens(evaluated: Callable[..., LossOutput]) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run, counts = torch.compile(evaluated, backend=counter, fullgraph=True, dynamic=True), set()
    for num_tokens in (24, 1000):
        logprob, entropy, tokens = random_tokens(num_tokens, torch.float64)
        tokens["cu_seqlens"] = torch.tensor([0, 7, num_tokens])
        found, want = (results(each, logprob, entropy, tokens) for each in (run, evaluated))
        assert_equal_in_float64(found, want, terms=num_tokens)
        counts.add(counter.frame_count)
    assert len(counts) == 1  # nothing is compiled after the first


@inductor
def test_inductor_makes_one_pass_forward_and_one_backward_and_writes_only_the_gradients() -> None:
    """In the code for the CPU; where reductions are split, as on GPUs, each ends in one more launch over the parts."""
    from torch._inductor.utils import run_and_get_code

    logprob, entropy, tokens = random_tokens(4096)
    run = torch.compile(of(penalised(ppo_clip())), fullgraph=True)
    found, codes = run_and_get_code(results, run, logprob, entropy, tokens)
    plain = results(of(penalised(ppo_clip())), logprob, entropy, tokens)
    wide = [x.detach().double().requires_grad_() for x in (logprob, entropy)]
    entries = {name: x.double() for name, x in tokens["per_token"].items()}
    exact = results(
        of(penalised(ppo_clip())), *wide, {"per_token": entries, "token_weight": tokens["token_weight"].double()}
    )
    assert_as_accurate(found, plain, exact)
    forward, backward = codes
    assert [len(re.findall(r"^cpp_fused\w* = ", code, re.MULTILINE)) for code in (forward, backward)] == [1, 1]
    assert re.findall(r"= empty_strided_cpu\(\(\d.*", forward) == []  # all that it writes are scalars
    assert backward.count("= empty_strided_cpu((4096, )") == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logprob": torch.zeros(2, 3)}, r"logprob must be \[T\]; got \[2, 3\]\. Flatten it"),
        ({"logprob": torch.zeros(3, dtype=torch.int64)}, "logprob must be float32"),
        ({"token_weight": torch.zeros(2)}, r"token_weight must be \[T\] = \[3\]; got \[2\]"),
        ({"token_weight": torch.tensor([1, torch.nan, 1])}, r"token_weight must be numbers; got nan at \[1\]"),
        ({"entropy": torch.zeros(2)}, r"entropy must be one value for each entry of logprob = \[3\]; got \[2\]"),
        ({"per_token": {"x": torch.zeros(2)}}, r"per_token\['x'\] must have one entry for each of the 3 rows of logp"),
        ({"per_token": {"x": torch.zeros(3, requires_grad=True)}}, r"per_token\['x'\] requires grad"),
        ({"loss_fn": 3}, r"token_loss takes a function of \(logprob, entropy, per_token\).* as loss_fn, got 3"),
        ({"loss_fn": gspo()}, "a sequence-level loss needs cu_seqlens, the boundaries of the sequences in logprob"),
        ({"loss_fn": gspo(), "cu_seqlens": torch.zeros(2)}, r"cu_seqlens must be \[N \+ 1\] integers; got \[2\]"),
        (
            {"loss_fn": gspo(), "cu_seqlens": torch.tensor([0, 2])},
            r"cu_seqlens must rise from 0 to the 3 tokens; got \[0, 2\]",
        ),
        (
            {"loss_fn": gspo(), "per_token": {"token_mask": torch.ones(3)}},
            "per_token must not hold token_mask: token_loss sets them; rename yours",
        ),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    entries = {"old_logprobs": torch.zeros(3), "advantages": torch.zeros(3)}
    arguments = {"logprob": torch.zeros(3), "loss_fn": ppo_clip(), "per_token": entries, "token_weight": torch.ones(3)}
    with pytest.raises(InvalidInputError, match=message):
        token_loss(**(arguments | change))  # type: ignore[arg-type]


@inductor
def test_the_code_of_the_page_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "losses.md"
    (block,) = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    assert names["logits"].grad.any() and names["stats"]["ratio_mean"] > 0


def test_statistics_are_means_by_weights_of_their_own() -> None:
    logprob = torch.tensor([-1.0, -2.0, -4.0, math.nan], dtype=torch.float64, requires_grad=True)

    def loss_fn(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprob, {"seen_mean": logprob}

    token_weight = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    weighted = token_loss(logprob, loss_fn, per_token={}, token_weight=token_weight)
    plain = token_loss(logprob, loss_fn, per_token={}, token_weight=token_weight, stats_weight=torch.ones(4))
    assert weighted.stats["seen_mean"] == -2.0
    assert_equal_in_float64(plain.stats["seen_mean"], torch.tensor(-7 / 3, dtype=torch.float64), terms=4)
    assert plain.loss == weighted.loss == 2.0
    with pytest.raises(InvalidInputError, match=r"^stats_weight must be one number for each row of logprob = \[4\]"):
        token_loss(logprob, loss_fn, per_token={}, token_weight=token_weight, stats_weight=torch.ones(3))
