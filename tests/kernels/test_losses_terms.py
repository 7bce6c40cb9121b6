"""Every term against its published value and gradient, written here over padded [N, L] batches.

The terms see the same batch packed. One sequence has one token, one has none that counts, one is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import (
    LossFn,
    cispo,
    cispo_absolute,
    combine,
    cpgd,
    decoupled_ppo,
    dppo,
    gmpo,
    gspo,
    icepop,
    kl,
    on_policy,
    opsm,
    ppo_clip,
    reinforce,
    sapo,
    sequence_level,
    sequence_mask,
    sequence_mean,
    tis,
    token_weights,
    vespo,
)
from tests.accuracy import assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64

N, L = 20, 9


class Padded(NamedTuple):
    """[N, L] float64; ``is_present`` marks tokens, ``m`` those that count, ``w`` weighs them."""

    x: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    A: Tensor
    is_present: Tensor
    m: Tensor
    w: Tensor

    @property
    def d(self) -> Tensor:
        return self.x - self.old

    @property
    def r(self) -> Tensor:
        return self.d.exp()

    @property
    def n(self) -> Tensor:
        """[N, 1]: |y_i|."""
        return self.m.sum(1, keepdim=True).clamp(min=1)

    def mean(self, values: Tensor) -> Tensor:
        """[N, 1]: over the tokens of each sequence that count."""
        return (values * self.m).sum(1, keepdim=True) / self.n


def padded_batch(*, per_token_advantage: bool) -> Padded:
    generator = torch.Generator().manual_seed(11)

    def normal(scale: float, *shape: int) -> Tensor:
        return torch.randn(shape or (N, L), generator=generator, dtype=torch.float64) * scale

    length = torch.randint(2, L + 1, (N,), generator=generator)
    length[0], length[1] = 1, 0
    is_present = torch.arange(L) < length[:, None]
    m = is_present & (torch.rand(N, L, generator=generator) < 0.8)
    m[0], m[2] = is_present[0], False
    x = -0.9 - normal(1.0).abs()
    advantage = normal(1.0) if per_token_advantage else normal(1.0, N, 1).expand(N, L)
    if per_token_advantage:
        advantage[3:, ::4] = 0.0
    spread = torch.linspace(-0.8, 1.4, N * L, dtype=torch.float64)[torch.randperm(N * L, generator=generator)]
    old, ref = x - spread.view(N, L), (x + normal(0.4)).clamp(max=-1e-3)
    rollout = (old + normal(0.4)).clamp(max=-1e-3)
    w = token_weights("seq-mean-token-mean", m).double()
    return Padded(x, old, ref, rollout, advantage, is_present, m.double(), w)


def per_token_of(batch: Padded) -> dict[str, Tensor]:
    packed = batch.is_present
    edges = torch.nn.functional.pad(packed.sum(1).cumsum(0), (1, 0))
    return {
        "old_logprobs": batch.old[packed],
        "ref_logprobs": batch.ref[packed],
        "rollout_logprobs": batch.rollout[packed],
        "advantages": batch.A[packed],
        "cu_seqlens": edges,
        "token_mask": batch.m[packed] != 0,
    }


def weighted(term: LossFn, x_T: Tensor, batch: Padded) -> Tensor:
    value, _ = term(x_T, None, per_token_of(batch))
    return torch.where(batch.m[batch.is_present] != 0, value, 0.0) * batch.w[batch.is_present]


def total(term: LossFn, x_T: Tensor, batch: Padded) -> Tensor:
    return weighted(term, x_T, batch).sum()


Formula = Callable[[Padded], tuple[Tensor, Tensor]]
"""The value [N, L], and the gradient [N, L] of the weighted sum of values."""


def clip_passes(ratio: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    return torch.where(A > 0, ratio <= high, ratio >= low).double()


def ppo_formula(b: Padded) -> tuple[Tensor, Tensor]:
    value = torch.maximum(-b.r * b.A, -b.r.clamp(0.8, 1.28) * b.A)
    return value, -b.w * b.A * b.r * clip_passes(b.r, b.A, 0.8, 1.28)


def dual_formula(b: Padded) -> tuple[Tensor, Tensor]:
    value, gradient = ppo_formula(b)
    value = torch.where(b.A < 0, torch.minimum(value, -1.5 * b.A), value)
    return value, gradient * ~((b.A < 0) & (b.r > 1.5))


def two_sided_formula(b: Padded) -> tuple[Tensor, Tensor]:
    value = -torch.minimum(b.r.clamp(max=1.5) * b.A, b.r.clamp(0.8, 1.28) * b.A)
    inside = torch.where(b.A > 0, b.r <= 1.28, (b.r >= 0.8) & (b.r <= 1.5))
    return value, -b.w * b.A * b.r * inside


def reinforce_formula(b: Padded) -> tuple[Tensor, Tensor]:
    return -b.A * b.x, -b.w * b.A


def cispo_formula(b: Padded) -> tuple[Tensor, Tensor]:
    return -b.r.clamp(0.8, 1.28) * b.A * b.x, -b.w * b.A * b.r.clamp(0.8, 1.28)


def cispo_absolute_formula(b: Padded) -> tuple[Tensor, Tensor]:
    return -b.r.clamp(max=1.4) * b.A * b.x, -b.w * b.A * b.r.clamp(max=1.4)


def cpgd_formula(b: Padded) -> tuple[Tensor, Tensor]:
    up = torch.minimum(b.x, b.old + math.log(1.28))
    down = torch.maximum(b.x, b.old + math.log(0.8))
    return -b.A * torch.where(b.A > 0, up, down), -b.w * b.A * clip_passes(b.r, b.A, 0.8, 1.28)


def drift_formula(b: Padded) -> tuple[Tensor, Tensor]:
    value, gradient = cpgd_formula(b)
    drift = (b.r - 1).clamp(max=2.0)
    return value + 0.3 * drift * b.x, gradient + b.w * 0.3 * drift


def sapo_formula(b: Padded) -> tuple[Tensor, Tensor]:
    k = torch.where(b.A > 0, 1.0, torch.full_like(b.A, 1.05))
    s = 1 / (1 + (-k * (b.r - 1)).exp())
    return -b.A * 4 / k * s, -b.w * 4 * b.A * s * (1 - s) * b.r


def dppo_formula(kind: str, delta: float) -> Formula:
    def formula(b: Padded) -> tuple[Tensor, Tensor]:
        p, q = b.x.exp(), b.old.exp()
        if kind == "tv":
            valid = torch.where(b.A > 0, p - q <= delta, p - q >= -delta)
        else:
            divergence = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
            valid = torch.where(b.A > 0, (divergence <= delta) | (p <= q), (divergence <= delta) | (p >= q))
        weight = b.r.clamp(max=1.6) * valid
        return -b.A * weight * b.x, -b.w * b.A * weight

    return formula


def weighted_formula(weigh: Callable[[Tensor], Tensor], *, by_sequence: bool = False) -> Formula:
    def formula(b: Padded) -> tuple[Tensor, Tensor]:
        log_weight = b.old - b.rollout
        w = weigh((b.mean(log_weight) if by_sequence else log_weight).exp())
        value, gradient = ppo_formula(b)
        return w * value, w * gradient

    return formula


def within(low: float, high: float) -> Callable[[Tensor], Tensor]:
    return lambda w: w * ((w >= low) & (w <= high))


def sequence_mask_formula(b: Padded) -> tuple[Tensor, Tensor]:
    geometric = b.mean(b.old - b.rollout).exp()
    w = (b.old - b.rollout).exp() * ((geometric >= 0.9) & (geometric <= 1.1))
    value, gradient = ppo_formula(b)
    return w * value, w * gradient


def gspo_formula(b: Padded) -> tuple[Tensor, Tensor]:
    s = b.mean(b.d).exp()
    value = torch.maximum(-s * b.A, -s.clamp(0.9, 1.1) * b.A)
    # of the mean over sequences: each token's weight is m / (n B), each value the same
    per_token = -b.A * s * clip_passes(s, b.A, 0.9, 1.1) * b.m / b.n
    return value, per_token * (b.w.sum(1, keepdim=True))


def gmpo_formula(b: Padded) -> tuple[Tensor, Tensor]:
    sign = b.A.sign()
    clipped = sign * torch.minimum(sign * b.d, sign * b.d.clamp(-0.3, 0.2))
    rho = b.mean(clipped).exp()
    passes = torch.where(b.A > 0, b.d <= 0.2, b.d >= -0.3) & (b.A != 0)
    per_token = -b.mean(b.A) * rho * b.m / b.n * passes
    return -b.mean(b.A) * rho * torch.ones_like(b.d), per_token * b.w.sum(1, keepdim=True)


def vespo_formula(b: Padded) -> tuple[Tensor, Tensor]:
    W = (b.d * b.m).sum(1, keepdim=True).clamp(math.log(1e-8), 20).exp()
    k, rate = torch.where(b.A >= 0, 2.0, 3.0).double(), torch.where(b.A >= 0, 3.0, 2.0).double()
    phi = W**k * (rate * (1 - W)).exp()
    return -phi * b.A * b.x, -b.w * phi * b.A


def opsm_formula(b: Padded, anchor: Callable[[Padded], Tensor], most: float) -> tuple[Tensor, Tensor]:
    kept = ~((b.A < 0) & (b.mean(anchor(b) - b.x) > most))
    value, gradient = ppo_formula(b)
    return kept * value, kept * gradient


def on_policy_formula(b: Padded) -> tuple[Tensor, Tensor]:
    return -b.A, -b.w * b.A


def kl_formula(value: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]) -> Formula:
    return lambda b: (0.3 * value(b.ref - b.x), 0.3 * b.w * gradient(b.ref - b.x))


def corrected_kl_formula(b: Padded) -> tuple[Tensor, Tensor]:
    k3 = (b.ref - b.x).exp() - (b.ref - b.x) - 1
    return 0.3 * b.r * k3, 0.3 * b.w * b.r * (b.x - b.ref)


TOKEN_TERMS: dict[str, tuple[Callable[[], LossFn], Formula]] = {
    "ppo_clip": (ppo_clip, ppo_formula),
    "dual clip": (lambda: ppo_clip(dual_clip=1.5), dual_formula),
    "two-sided clip": (lambda: ppo_clip(dual_clip=1.5), two_sided_formula),
    "on policy": (lambda: on_policy(ppo_clip()), on_policy_formula),
    "reinforce": (reinforce, reinforce_formula),
    "cispo": (cispo, cispo_formula),
    "cispo_absolute": (lambda: cispo_absolute(max_ratio=1.4), cispo_absolute_formula),
    "cpgd": (cpgd, cpgd_formula),
    "cpgd with drift": (lambda: cpgd(drift_coef=0.3), drift_formula),
    "sapo": (sapo, sapo_formula),
    "dppo tv": (lambda: dppo(delta_low=0.05, delta_high=0.05, max_ratio=1.6), dppo_formula("tv", 0.05)),
    "dppo kl": (lambda: dppo(kind="kl", delta_low=0.02, delta_high=0.02, max_ratio=1.6), dppo_formula("kl", 0.02)),
    "tis": (lambda: tis(ppo_clip(), cap=1.2, floor=0.7), weighted_formula(lambda w: w.clamp(0.7, 1.2))),
    "icepop": (lambda: icepop(ppo_clip(), low=0.7, high=1.2), weighted_formula(within(0.7, 1.2))),
    "decoupled mask": (lambda: decoupled_ppo(weight_high=1.2), weighted_formula(within(0.0, 1.2))),
    "decoupled clamp": (
        lambda: decoupled_ppo(weight_low=0.7, weight_high=1.2, outside="clamp"),
        weighted_formula(lambda w: w.clamp(0.7, 1.2)),
    ),
    "k1": (lambda: kl(kind="k1", coef=0.3), kl_formula(lambda d: -d, torch.ones_like)),
    "abs": (lambda: kl(kind="abs", coef=0.3), kl_formula(lambda d: d.abs(), lambda d: -d.sign())),
    "k2": (lambda: kl(kind="k2", coef=0.3), kl_formula(lambda d: d * d / 2, lambda d: -d)),
    "k3": (lambda: kl(kind="k3", coef=0.3), kl_formula(lambda d: d.exp() - d - 1, lambda d: 1 - d.exp())),
    "k1+": (lambda: kl(kind="k1+", coef=0.3), kl_formula(lambda d: -d, lambda d: -d)),
    "k3+": (lambda: kl(kind="k3+", coef=0.3), kl_formula(lambda d: d.exp() - d - 1, lambda d: -d)),
    "r*k3": (lambda: kl(kind="r*k3", coef=0.3), corrected_kl_formula),
}
SEQUENCE_TERMS: dict[str, tuple[Callable[[], LossFn], Formula]] = {
    "gspo": (lambda: gspo(clip_low=0.1, clip_high=0.1), gspo_formula),
    "gspo token form": (lambda: gspo(clip_low=0.1, clip_high=0.1, form="token"), gspo_formula),
    "gmpo": (lambda: gmpo(clip_low=0.3, clip_high=0.2), gmpo_formula),
    "vespo": (vespo, vespo_formula),
    "opsm": (lambda: opsm(ppo_clip(), max_kl=0.05), lambda b: opsm_formula(b, lambda b: b.old, 0.05)),
    "opsm of the sampler": (
        lambda: opsm(ppo_clip(), max_kl=0.1, anchor="rollout_logprobs"),
        lambda b: opsm_formula(b, lambda b: b.rollout, 0.1),
    ),
    "gspo on policy": (lambda: on_policy(gspo()), on_policy_formula),
    "sequence tis": (
        lambda: tis(ppo_clip(), cap=1.05, floor=0.9, level="sequence"),
        weighted_formula(lambda w: w.clamp(0.9, 1.05), by_sequence=True),
    ),
    "sequence icepop": (
        lambda: icepop(ppo_clip(), low=0.9, high=1.1, level="sequence"),
        weighted_formula(within(0.9, 1.1), by_sequence=True),
    ),
    "sequence mask": (
        lambda: sequence_mask(tis(ppo_clip(), cap=math.inf), low=0.9, high=1.1),
        sequence_mask_formula,
    ),
    "decoupled by sequence": (
        lambda: decoupled_ppo(weight_low=0.9, weight_high=1.1, level="sequence"),
        weighted_formula(within(0.9, 1.1), by_sequence=True),
    ),
}
TERMS = TOKEN_TERMS | SEQUENCE_TERMS
DETACHED = {
    *("cispo", "cispo_absolute", "cpgd with drift", "dppo tv", "dppo kl", "k1+", "k3+", "gspo token form", "vespo"),
    *("on policy", "gspo on policy"),
}
"""Their gradient is, by design, not that of their value."""


def test_the_batch_reaches_every_branch() -> None:
    batch = padded_batch(per_token_advantage=True)
    counts, A, r = batch.m != 0, batch.A, batch.r
    for sign in (A > 0, A < 0):
        for lowest, highest in ((0, 0.8), (0.8, 1.28), (1.28, 1.5), (1.5, 3), (3, 9)):
            assert (counts & sign & (r > lowest) & (r < highest)).any(), (lowest, highest)
    assert (counts & (A == 0) & (r > 1.5)).any() and (counts & (A == 0) & (r < 0.7)).any()


@pytest.mark.parametrize("name", TERMS)
def test_values_and_gradients_are_the_published_ones(name: str) -> None:
    make, formula = TERMS[name]
    batch = padded_batch(per_token_advantage=name in TOKEN_TERMS or name == "gmpo")
    counts = batch.m[batch.is_present] != 0
    x = batch.x[batch.is_present].requires_grad_()
    value, _ = make()(x, None, per_token_of(batch))
    want_value, want_gradient = (found[batch.is_present] for found in formula(batch))
    assert_equal_in_float64(value[counts], want_value[counts], terms=L + 16)
    gradient = torch.autograd.grad(total(make(), x, batch), x)[0]
    assert_equal_in_float64(gradient, want_gradient, terms=L + 16)
    assert gradient[counts].count_nonzero() > 0 and gradient[~counts].count_nonzero() == 0


@pytest.mark.parametrize("name", TERMS)
def test_a_term_names_no_package(name: str) -> None:
    """Worker processes get a term by value: of a function that names one, cloudpickle searches all imported modules."""
    make, _ = TERMS[name]
    sent = list(functions_sent(make()))
    assert sent
    named = [function.__globals__.get(name) for function in sent for name in function.__code__.co_names]
    assert [found.__name__ for found in named if isinstance(found, ModuleType) and found.__package__] == []


def functions_sent(value: Any) -> Iterator[FunctionType]:
    """Yield the functions made inside others that a term consists of."""
    if isinstance(value, sequence_level):
        yield from functions_sent(value.function)
    elif isinstance(value, FunctionType) and "<locals>" in value.__qualname__:
        yield value
        for cell in value.__closure__ or ():
            yield from functions_sent(cell.cell_contents)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TERMS.keys() - DETACHED))
def test_gradients_match_finite_differences(name: str) -> None:
    term, batch = TERMS[name][0](), padded_batch(per_token_advantage=True)
    x = batch.x[batch.is_present].requires_grad_()
    gradient, h = torch.autograd.grad(total(term, x, batch), x)[0], 1e-6
    for seed in range(3):
        direction = torch.randn(len(x), generator=torch.Generator().manual_seed(seed)).sign().double()
        up, down = (weighted(term, x.detach() + step * direction, batch) for step in (h, -h))
        # The third derivative counts for h^2, which is less than the rounding of the values over h.
        rounded = (up.abs() + down.abs() + batch.w[batch.is_present]).sum() / h
        difference = (up - down).sum() / (2 * h)
        assert_within_rounding(gradient @ direction, difference, terms=len(x), magnitude=rounded)


POLICY_TERMS = [name for name in TERMS if name not in ("k1", "abs", "k2", "k3", "k1+", "k3+", "r*k3")]


@pytest.mark.parametrize("name", POLICY_TERMS)
def test_at_ratio_one_every_policy_gradient_is_minus_the_advantage(name: str) -> None:
    base = padded_batch(per_token_advantage=False)
    batch = base._replace(old=base.x, rollout=base.x)
    x = batch.x[batch.is_present].requires_grad_()
    gradient = torch.autograd.grad(total(TERMS[name][0](), x, batch), x)[0]
    assert_equal_in_float64(gradient, (-batch.w * batch.A)[batch.is_present], terms=L + 16)


@pytest.mark.parametrize(
    "term", [ppo_clip(), gspo(), gspo(form="token"), gmpo(), decoupled_ppo(), sequence_mask(ppo_clip(), low=1, high=1)]
)
def test_at_ratio_one_the_value_is_minus_the_advantage(term: LossFn) -> None:
    base = padded_batch(per_token_advantage=False)
    batch = base._replace(old=base.x, rollout=base.x)
    value, _ = term(batch.x[batch.is_present], None, per_token_of(batch))
    counts = batch.m[batch.is_present] != 0
    assert_equal_in_float64(value[counts], -batch.A[batch.is_present][counts], terms=L + 16)


@pytest.mark.parametrize("name", TERMS)
def test_what_masked_tokens_hold_reaches_no_other_token(name: str) -> None:
    term, batch = TERMS[name][0](), padded_batch(per_token_advantage=True)
    counts = batch.m[batch.is_present] != 0
    x = batch.x[batch.is_present].requires_grad_()
    value, _ = term(x, None, per_token_of(batch))
    want = torch.autograd.grad((value * counts)[counts].sum(), x)[0]
    for garbage in (math.nan, math.inf, -math.inf):
        dirty = {
            key: values.masked_fill(~counts, garbage) if values.is_floating_point() else values
            for key, values in per_token_of(batch).items()
        }
        x_dirty = x.detach().masked_fill(~counts, garbage).requires_grad_()
        found, _ = term(x_dirty, None, dirty)
        assert torch.equal(found[counts], value[counts])
        gradient = torch.autograd.grad(found[counts].sum(), x_dirty)[0]
        assert torch.equal(gradient[counts], want[counts])


WITHOUT_EXPONENTIAL = {(kind, "ref_logprobs") for kind in ("k1", "abs", "k2", "k1+", "k3+")}
"""Terms, and the log-probabilities that are in their values as they are; beside them, cpgd."""


def of_two_sequences(advantage: float) -> dict[str, Tensor]:
    logprobs = {name: torch.tensor([-1.0, -2.0, -3.0, -1.5]) for name in ("old_logprobs", "ref_logprobs")}
    return logprobs | {
        "rollout_logprobs": torch.tensor([-1.1, -2.0, -3.0, -1.5]),
        "advantages": torch.full((4,), advantage),
        "cu_seqlens": torch.tensor([0, 2, 4]),
        "token_mask": torch.ones(4).bool(),
    }


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("entry", ["old_logprobs", "ref_logprobs", "rollout_logprobs"])
def test_a_log_prob_of_minus_infinity_of_another_policy_makes_a_finite_ratio(
    name: str, advantage: float, entry: str
) -> None:
    x, per_token = torch.tensor([-1.2, -1.8, -2.8, -1.7]).requires_grad_(), of_two_sequences(advantage)
    per_token[entry][1] = -math.inf
    value, stats = TERMS[name][0]()(x, None, per_token)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value[[0, 2, 3]].isfinite().all() and gradient[[0, 2, 3]].isfinite().all()
    is_cpgds = name.startswith("cpgd") and entry == "old_logprobs"
    stays = advantage < 0 if is_cpgds else (name, entry) not in WITHOUT_EXPONENTIAL  # cpgd stops the others, at -inf
    assert value[1].isfinite() == stays
    assert gradient[1].isfinite() or not (stays or is_cpgds)
    if name.startswith("dppo"):
        assert all(values.isfinite().all() for values in stats.values())


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("entry", ["old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages"])
def test_a_nan_of_a_token_that_counts_is_seen(name: str, entry: str) -> None:
    read: set[str] = set()

    class Entries(dict[str, Tensor]):
        def __getitem__(self, key: str) -> Tensor:
            read.add(key)
            return super().__getitem__(key)

    x, per_token = torch.tensor([-1.2, -1.8, -2.8, -1.7]), of_two_sequences(1.0)
    per_token[entry][1] = math.nan
    value, stats = TERMS[name][0]()(x, None, Entries(per_token))
    is_seen = any(bool(values.isnan().any()) for values in (value, *stats.values()))
    assert is_seen or entry not in read


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_absurd_ratios_give_a_finite_loss_and_gradient(name: str, advantage: float) -> None:
    x = torch.tensor([0.0, -500.0, -500.0, -1.0]).requires_grad_()
    per_token = {
        "old_logprobs": torch.tensor([-500.0, 0.0, -1.0, -500.0]),
        "ref_logprobs": torch.tensor([-500.0, 0.0, -1.0, -500.0]),
        "rollout_logprobs": torch.tensor([0.0, -500.0, 0.0, -1.0]),
        "advantages": torch.full((4,), advantage),
        "cu_seqlens": torch.tensor([0, 1, 2, 4]),
        "token_mask": torch.ones(4, dtype=torch.bool),
    }
    value, stats = TERMS[name][0]()(x, None, per_token)
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), x)[0].isfinite().all()
    assert all(values.isfinite().all() for values in stats.values())


@pytest.mark.parametrize("name", TERMS)
def test_nothing_waits_for_the_device(name: str) -> None:
    """On the meta device no value can be read, so that whatever would wait raises."""
    batch = padded_batch(per_token_advantage=True)
    per_token = {key: values.to("meta") for key, values in per_token_of(batch).items()}
    x = batch.x[batch.is_present].to("meta").requires_grad_()
    value, stats = TERMS[name][0]()(x, None, per_token)
    assert value.shape == torch.autograd.grad(value.sum(), x)[0].shape == x.shape
    assert all(values.shape == x.shape for values in stats.values())


CLIPPED = {
    "ppo_clip": lambda: ppo_clip(clip_low=0.3, clip_high=0.4),
    "gspo": lambda: gspo(clip_low=0.3, clip_high=0.4),
    "gspo token form": lambda: gspo(form="token", clip_low=0.3, clip_high=0.4),
    "gmpo": lambda: gmpo(clip_low=0.3, clip_high=0.4),
    "cpgd": lambda: cpgd(clip_low=0.3, clip_high=0.4),
    "decoupled_ppo": lambda: decoupled_ppo(clip_low=0.3, clip_high=0.4),
    "dppo tv": lambda: dppo(kind="tv", delta_low=0.15, delta_high=0.15),
    "dppo kl": lambda: dppo(kind="kl", delta_low=0.05, delta_high=0.05),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clip_shares_count_the_tokens_that_are_beyond_a_bound_and_driven_further(name: str) -> None:
    ratio = torch.tensor([0.5, 0.5, 0.9, 0.9, 1.1, 1.1, 2.0, 2.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    old = torch.full_like(ratio, -1.0)  # a probability of 0.37, which is 0.18 and 0.74 at the outer ratios
    per_token = {
        "old_logprobs": old,
        "rollout_logprobs": old - 1.0,  # of no influence: bounds are around the old policy
        "advantages": advantage,
        "cu_seqlens": torch.arange(9),  # sequences of one token, so that ratios of sequences are those of tokens
        "token_mask": torch.ones(8, dtype=torch.bool),
    }
    _, stats = CLIPPED[name]()(old + ratio.log(), None, per_token)
    assert stats["clip_low_mean"].tolist() == [False, True, False, False, False, False, False, False]
    assert stats["clip_high_mean"].tolist() == [False, False, False, False, False, False, True, False]


def test_both_forms_of_gspo_differ_once_advantages_differ_within_a_sequence() -> None:
    batch = padded_batch(per_token_advantage=True)
    x = batch.x[batch.is_present].requires_grad_()
    sequence, token = (torch.autograd.grad(total(gspo(form=form), x, batch), x)[0] for form in ("sequence", "token"))
    assert (sequence - token).abs().max() > 1e-3


def test_the_two_conventions_of_cispo_agree_where_their_bounds_do() -> None:
    batch = padded_batch(per_token_advantage=True)
    x, per_token = batch.x[batch.is_present], per_token_of(batch)
    relative, _ = cispo(clip_low=1.0, clip_high=0.5)(x, None, per_token)
    absolute, _ = cispo_absolute(max_ratio=1.5)(x, None, per_token)
    assert torch.equal(relative, absolute)


def test_corrected_k3_is_unbiased_for_samples_of_the_old_policy_and_so_is_its_gradient() -> None:
    logits = torch.randn(12, dtype=torch.float64, requires_grad=True)
    old, reference = torch.randn(2, 12, dtype=torch.float64).log_softmax(1)
    policy = logits.log_softmax(0)
    value, _ = kl(kind="r*k3", coef=1.0)(policy, None, {"ref_logprobs": reference, "old_logprobs": old})
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = (old.exp() * value).sum()
    assert_equal_in_float64(estimate, exact, terms=12)
    found, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, exact))
    assert_equal_in_float64(found, want, terms=12)


def test_vespo_weighs_a_sequence_that_has_not_moved_by_one_and_absurd_ones_by_nothing() -> None:
    per_token = {
        "old_logprobs": torch.tensor([-1.0, -2.0, -9.0, -9.0, -1.0, -1.0]),
        "advantages": torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0]),
        "cu_seqlens": torch.tensor([0, 2, 4, 6]),
        "token_mask": torch.ones(6, dtype=torch.bool),
    }
    x = torch.tensor([-1.0, -2.0, -1.0, -1.0, -40.0, -40.0])
    value, stats = vespo()(x, None, per_token)
    assert stats["vespo_weight_mean"].tolist()[:2] == [1.0, 1.0]
    assert (stats["vespo_weight_mean"][2:] < torch.finfo(torch.float32).eps).all()
    assert torch.equal(value[:2], torch.tensor([1.0, -2.0]))


def test_opsm_leaves_out_only_bad_sequences_that_have_become_unlikely() -> None:
    per_token = {
        "old_logprobs": torch.zeros(8),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]),
        "cu_seqlens": torch.tensor([0, 2, 4, 6, 8]),
        "token_mask": torch.tensor([1, 1, 1, 1, 1, 1, 1, 0]) != 0,
    }
    x = torch.tensor([-1.0, -1.0, -1.0, -0.5, -0.1, -0.1, -0.2, -9.0], requires_grad=True)
    value, stats = opsm(reinforce(), max_kl=0.2)(x, None, per_token)
    assert stats["opsm_cut_mean"].tolist() == [False, False, True, True, False, False, False, False]
    assert torch.autograd.grad(value.sum(), x)[0].tolist() == [-1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert_within_rounding(stats["opsm_kl_max"][2:4].double(), torch.tensor([0.75, 0.75]).double(), terms=4,
                           dtype=torch.float32)  # fmt: skip


def test_on_policy_needs_no_old_log_probabilities_and_serves_weights_of_samplers() -> None:
    batch = padded_batch(per_token_advantage=True)
    per_token = per_token_of(batch)
    x = batch.x[batch.is_present].requires_grad_()
    without = {name: values for name, values in per_token.items() if name != "old_logprobs"}
    value, stats = on_policy(ppo_clip())(x, None, without)
    assert torch.equal(value, -without["advantages"]) and (stats["ratio_mean"] == 1).all()
    weighted_value, _ = on_policy(tis(ppo_clip(), cap=1.2))(x, None, without)
    ratio = (x.detach() - without["rollout_logprobs"]).exp().clamp(max=1.2)
    assert_equal_in_float64(weighted_value.detach(), -ratio * without["advantages"], terms=16)


@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 1000), (torch.float16, 5000)], ids=str)
def test_sums_over_a_sequence_do_not_stop_growing_in_16_bits(dtype: torch.dtype, length: int) -> None:
    """Quarters are exact, and so is each sum of so many in float32."""
    per_token = {"cu_seqlens": torch.tensor([0, length]), "token_mask": torch.ones(length).bool()}
    values = torch.tensor([-0.25, 0.0], dtype=dtype).repeat(length // 2)
    assert torch.equal(sequence_mean(values, per_token), torch.full((length,), -0.125))
    kept = sequence_mask(reinforce(), low=0.8, high=1.2)
    inputs = {"advantages": torch.ones(length), "old_logprobs": values, "rollout_logprobs": values * 2}
    value, stats = kept(values - 1, None, per_token | inputs)  # a ratio of e^(1/8)
    assert value.count_nonzero() == length and not stats["sequence_mask_cut_mean"].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_sampler_that_knows_no_log_prob_gives_no_gradient_of_nan(level: Any) -> None:
    logprob = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    per_token = {
        "cu_seqlens": torch.tensor([0, 2, 3]),
        "token_mask": torch.ones(3).bool(),
        "advantages": torch.ones(3),
        "old_logprobs": logprob.detach(),
        "rollout_logprobs": torch.tensor([-1.0, math.nan, -2.0]),
    }
    value, _ = tis(reinforce(), level=level)(logprob, None, per_token)
    value.sum().backward()
    assert logprob.grad is not None and logprob.grad.tolist() == [0.0 if level == "sequence" else -1.0, 0.0, -1.0]


def test_advantages_may_be_whole_numbers() -> None:
    logprob, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5])
    term = sapo(temperature_positive=1.5, temperature_negative=0.5)
    whole, real = (
        term(logprob, None, {"old_logprobs": old, "advantages": torch.tensor([1, -1], dtype=dtype)})[0]
        for dtype in (torch.int64, torch.float32)
    )
    assert torch.equal(whole, real)


def test_sequence_mean_is_differentiable_and_zero_where_nothing_counts() -> None:
    per_token = {"cu_seqlens": torch.tensor([0, 3, 3, 5]), "token_mask": torch.tensor([1, 0, 1, 0, 0]) != 0}
    x = torch.tensor([1.0, math.nan, 5.0, math.inf, 7.0], dtype=torch.float64, requires_grad=True)
    mean = sequence_mean(x, per_token)
    assert mean.tolist() == [3.0, 3.0, 3.0, 0.0, 0.0]
    assert torch.autograd.grad(mean.sum(), x)[0].tolist() == [1.5, 0.0, 1.5, 0.0, 0.0]


def test_only_terms_that_need_sequences_are_sequence_level() -> None:
    for name, (make, _) in TERMS.items():
        assert isinstance(make(), sequence_level) == (name in SEQUENCE_TERMS), name
    assert isinstance(tis(gspo()), sequence_level) and isinstance(icepop(gmpo()), sequence_level)


def test_clip_statistics_count_the_tokens_that_a_bound_stopped() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0, 0.5, 2.0])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    per_token = {"old_logprobs": torch.full((7,), -2.0), "advantages": advantages}
    x = ratio.log() - 2
    for term in (cpgd(), dppo(delta_low=0.05, delta_high=0.1), dppo(kind="kl", delta_low=0.02, delta_high=0.02)):
        _, stats = term(x, None, per_token)
        assert stats["clip_low_mean"].nonzero().flatten().tolist() == [1]
        assert stats["clip_high_mean"].nonzero().flatten().tolist() == [3]
    _, stats = cispo()(x, None, per_token)
    assert stats["clip_low_mean"].nonzero().flatten().tolist() == [0, 1, 5]
    assert stats["clip_high_mean"].nonzero().flatten().tolist() == [3, 4, 6]
    alone = {"cu_seqlens": torch.arange(8), "token_mask": torch.ones(7, dtype=torch.bool)}
    _, stats = gmpo(clip_low=0.4, clip_high=0.4)(x, None, per_token | alone)
    assert stats["clip_low_mean"].nonzero().flatten().tolist() == [1]
    assert stats["clip_high_mean"].nonzero().flatten().tolist() == [3]


def test_importance_statistics_tell_the_raw_ratio_from_the_weight() -> None:
    ratio = torch.tensor([0.25, 1.0, 4.0])
    per_token = {
        "old_logprobs": torch.zeros(3),
        "rollout_logprobs": -ratio.log(),
        "advantages": torch.ones(3),
    }
    _, stats = tis(reinforce(), cap=2.0)(torch.zeros(3), None, per_token)
    assert stats["tis_weight_mean"].tolist() == [0.25, 1.0, 2.0]
    assert stats["tis_weight_square_mean"].tolist() == [0.0625, 1.0, 4.0]
    assert stats["tis_cut_mean"].tolist() == [False, False, True]
    assert_within_rounding(stats["tis_ratio_max"], ratio, terms=16)  # a logarithm and an exponential of it
    _, stats = icepop(reinforce(), low=0.5, high=2.0)(torch.zeros(3), None, per_token)
    assert stats["icepop_weight_mean"].tolist() == [0.0, 1.0, 0.0]
    assert stats["icepop_cut_mean"].tolist() == [True, False, True]
    edges = {"cu_seqlens": torch.tensor([0, 1, 3]), "token_mask": torch.ones(3, dtype=torch.bool)}
    _, stats = sequence_mask(reinforce(), low=0.1, high=1.5)(torch.zeros(3), None, per_token | edges)
    assert stats["sequence_mask_cut_mean"].tolist() == [False, True, True]
    assert_within_rounding(stats["sequence_mask_ratio_max"], torch.tensor([0.25, 2.0, 2.0]), terms=16)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ppo_clip(clip_low=1.5), r"ppo_clip: clip_low must be in \[0, 1\]; got 1.5"),
        (lambda: ppo_clip(clip_high=-0.1), "ppo_clip: clip_high must be >= 0; got -0.1"),
        (lambda: ppo_clip(clip_high=math.nan), "clip_high must be >= 0; got nan"),
        (lambda: ppo_clip(dual_clip=1.0), "ppo_clip: dual_clip must be > 1, or None; got 1.0"),
        (lambda: kl(kind="k4", coef=1.0), "kl: kind must be one of k1, k2, k3, abs, .*; got 'k4'"),  # type: ignore[arg-type]
        (lambda: cpgd(drift_coef=math.inf), "cpgd: drift_coef must be a finite number; got inf"),
        (combine, "combine needs at least one loss term"),
        (lambda: combine(kl(coef=0.1), 2), "combine takes a function of .* as term 1, got 2"),
        (lambda: gspo(clip_low=-0.1), r"gspo: clip_low must be in \[0, 1\]; got -0.1"),
        (lambda: gspo(form="word"), "gspo: form must be one of sequence, token; got 'word'"),  # type: ignore[arg-type]
        (lambda: gmpo(clip_low=-1.0), r"gmpo: clip_low must be >= 0 \(a bound of the log-ratio\); got -1.0"),
        (lambda: gmpo(clip_high=math.nan), "gmpo: clip_high must be >= 0 .*; got nan"),
        (lambda: cispo(clip_low=2.0), r"cispo: clip_low must be in \[0, 1\]; got 2.0"),
        (
            lambda: cispo_absolute(max_ratio=0.28),
            r"cispo_absolute: max_ratio must be >= 1, .*; got 0.28. cispo\(clip_high=...\) is measured from 1",
        ),
        (lambda: cpgd(clip_high=-1.0), "cpgd: clip_high must be >= 0; got -1.0"),
        (lambda: cpgd(drift_coef=-1.0), "cpgd: drift_coef must be >= 0; got -1.0"),
        (lambda: sapo(temperature_negative=0.0), "sapo: temperature_negative must be a finite number > 0; got 0.0"),
        (lambda: dppo(kind="js"), "dppo: kind must be one of tv, kl; got 'js'"),  # type: ignore[arg-type]
        (lambda: dppo(delta_high=-0.1), "dppo: delta_high must be >= 0; got -0.1"),
        (lambda: dppo(max_ratio=0.0), "dppo: max_ratio must be a finite number > 0; got 0.0"),
        (lambda: tis(ppo_clip(), cap=0.0), "tis: need 0 <= floor <= cap and cap > 0, .*; got floor=0.0, cap=0.0"),
        (lambda: icepop(ppo_clip(), low=3.0, high=2.0), "icepop: need 0 <= low <= high .*; got low=3.0, high=2.0"),
        (lambda: sequence_mask(ppo_clip(), low=-1.0, high=2.0), "sequence_mask: need 0 <= low <= high .* got low=-1.0"),
        (lambda: tis(ppo_clip(), level="batch"), "tis: level must be one of token, sequence; got 'batch'"),  # type: ignore[arg-type]
        (
            lambda: decoupled_ppo(outside="drop"),  # type: ignore[arg-type]
            "decoupled_ppo: outside must be one of mask, clamp; got 'drop'",
        ),
        (lambda: decoupled_ppo(weight_low=9.0), "decoupled_ppo weights: need 0 <= low <= high .*; got low=9.0, high=5"),
        (lambda: decoupled_ppo(dual_clip=0.5), "ppo_clip: dual_clip must be > 1, or None; got 0.5"),
    ],
)
def test_a_bad_parameter_is_refused_when_the_term_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()


@pytest.mark.parametrize(
    "term, missing, message",
    [
        (kl(coef=1.0), "ref_logprobs", r"kl needs per_token\['ref_logprobs'\]; got \['advantages', "),
        (gspo(), "cu_seqlens", r"sequence_mean needs per_token\['cu_seqlens'\]"),
        (gspo(), "old_logprobs", r"gspo needs per_token\['old_logprobs'\]"),
        (dppo(), "advantages", r"dppo needs per_token\['advantages'\]"),
        (tis(reinforce()), "rollout_logprobs", r"tis needs per_token\['rollout_logprobs'\]"),
        (decoupled_ppo(), "rollout_logprobs", r"decoupled_ppo needs per_token\['rollout_logprobs'\]"),
        (kl(kind="r*k3", coef=1.0), "old_logprobs", r"kl with kind='r\*k3' needs per_token\['old_logprobs'\]"),
    ],
)
def test_a_missing_entry_is_named_with_the_loss_that_wants_it(term: LossFn, missing: str, message: str) -> None:
    batch = padded_batch(per_token_advantage=True)
    per_token = per_token_of(batch)
    del per_token[missing]
    with pytest.raises(InvalidInputError, match=message):
        term(batch.x[batch.is_present], None, per_token)


def test_a_weight_applied_twice_is_refused() -> None:
    batch = padded_batch(per_token_advantage=True)
    with pytest.raises(InvalidInputError, match=r"tis: two terms report tis_cut_mean, .*; rename one of them"):
        tis(tis(reinforce()))(batch.x[batch.is_present], None, per_token_of(batch))
