"""RMSNorm by an operator that a made-up plugin registers for the CPU."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore import rms_norm
from rlcore.registry import OpImplementation, registry
from tests.accuracy import assert_as_accurate, assert_same_bits, assert_within_rounding

CPU = torch.device("cpu")
_calls: list[str] = []


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """As transformers' are: the weight is applied after the cast."""

    def __init__(self, width: int = 24, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, width))
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = widened(hidden)
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normal.to(hidden.dtype)


class AddingRMSNorm(RMSNorm):
    """As Gemma's."""

    def forward(self, hidden: Tensor) -> Tensor:
        wide = widened(hidden)
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return ((1 + widened(self.weight)) * normal).to(hidden.dtype)


class GivenRMSNorm(RMSNorm):
    """Reads what an instance was given beside the weight."""

    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.doubles = flag

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (2 if self.doubles else 1)


def right(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Everything in float32, and one cast."""
    _calls.append("right")
    return nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def without_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return right(x, weight, 0.0)


def with_wrong_gradient(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return right(x, weight * 0.9 + weight.detach() * 0.1, eps)


def raising(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise RuntimeError("error code 561002")


def register(patch: pytest.MonkeyPatch, *names: str) -> None:
    entries = [
        OpImplementation(rms_norm.OPERATOR, "cpu", name, -place, f"{__name__}:{name}", None, "mine")
        for place, name in enumerate(names)
    ]
    patch.setitem(registry().ops, rms_norm.OPERATOR, entries)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    _calls.clear()
    rms_norm.choose.cache_clear()
    yield
    rms_norm.choose.cache_clear()


def results(
    module: nn.Module, dtype: torch.dtype = torch.float32, *, rounded_to: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(5, 24, generator=generator), torch.randn(5, 24, generator=generator)
    output = module(x := x.to(rounded_to).to(dtype).requires_grad_())
    return [output.detach(), *torch.autograd.grad((widened(output) * gradient).sum(), [x, module.weight])]


def in_float64(norm: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What results are near to, of inputs rounded to ``dtype``."""
    return results(copy.deepcopy(norm).double(), torch.float64, rounded_to=dtype)


def said(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.messages[-1].split(": ", 1)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [RMSNorm(), nn.RMSNorm(24, eps=1e-6)], ids=["transformers", "torch"])
def test_an_operator_that_gives_the_same_runs(
    norm: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlcore")
    register(monkeypatch, "right")
    norm = copy.deepcopy(norm).to(dtype)
    expected, names = results(norm, dtype), list(norm.state_dict())
    twin, exact = copy.deepcopy(norm), in_float64(norm, dtype)
    rms_norm.use_device_norms(twin, CPU)
    assert type(twin) is type(norm) and list(twin.state_dict()) == names
    results(twin, dtype)
    _calls.clear()
    for module in (twin, copy.deepcopy(twin)):  # a copy asks with its own weight
        assert_as_accurate(results(module, dtype), expected, exact)
    assert _calls == ["right"] * 2, "and it is not tried again"
    assert said(caplog) == "right runs"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("without_eps", "not without_eps: its probe gave another output: relative error"),
        ("with_wrong_gradient", "not with_wrong_gradient: its probe gave another dweight: relative error 1.0e-01"),
        ("raising", "not raising: its probe failed: RuntimeError: error code 561002"),
    ],
)
def test_a_wrong_one_is_refused_with_the_reason_and_the_next_is_tried(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlcore")
    register(monkeypatch, name, "right")
    norm = RMSNorm()
    rms_norm.use_device_norms(norm, CPU)
    results(norm)
    assert said(caplog).startswith(reason) and said(caplog).endswith("; right runs")


@pytest.mark.parametrize(
    ("norm", "dtype", "reason"),
    [
        (AddingRMSNorm(), torch.float32, "another output"),
        (GivenRMSNorm(True), torch.float32, "another output"),
        (RMSNorm(), torch.bfloat16, "it gives torch.bfloat16, the module torch.float32"),  # its weight is float32
        (RMSNorm().double(), torch.float64, "it is not tried in torch.float64"),
    ],
)
def test_a_norm_of_another_kind_keeps_its_own(
    norm: nn.Module, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlcore")
    register(monkeypatch, "right")
    expected = results(norm, dtype)
    rms_norm.use_device_norms(norm, CPU)
    results(norm, dtype)
    _calls.clear()
    for found, own in zip(results(norm, dtype), expected, strict=True):
        assert_same_bits(found, own)  # its own forward
    assert not _calls and reason in said(caplog)


def test_instances_of_a_class_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "right")
    for doubles in (False, True):
        norm = GivenRMSNorm(doubles)
        rms_norm.use_device_norms(norm, CPU)
        exact = norm.weight.double()[None] * (1 + doubles) / math.sqrt(1 + norm.variance_epsilon)
        assert_within_rounding(norm(torch.ones(1, 24)), exact, terms=32)  # 24 squares, and what is done with their sum


class Biased(RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(24))


Biased.__name__ = "BiasedRMSNorm"


def test_what_is_no_plain_norm_or_has_no_operator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RMSNorm()
    rms_norm.use_device_norms(norm, CPU)
    assert "forward" not in vars(norm), "nothing is registered"
    register(monkeypatch, "right")
    rms_norm.use_device_norms(norm, torch.device("meta"))
    others = nn.ModuleList([Biased(), nn.LayerNorm(24), nn.RMSNorm(24), nn.RMSNorm((2, 12), eps=1e-6), norm])
    norm.forward = mine = lambda hidden: hidden  # somebody's own
    rms_norm.use_device_norms(others, CPU)
    assert [part for part in others if "forward" in vars(part)] == [norm] and norm.forward is mine


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_compiled_under_autocast_and_of_fake_tensors_its_own_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    register(monkeypatch, "right")
    norm = RMSNorm()
    expected = results(norm)
    rms_norm.use_device_norms(norm, CPU)
    ways = [results(torch.compile(norm, backend="eager", fullgraph=True))]
    with torch.autocast("cpu", torch.bfloat16):
        ways.append(results(norm))
    for found in ways:
        assert all(map(torch.equal, found, expected)), "the same operations"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert norm(mode.from_tensor(torch.ones(2, 24))).shape == (2, 24)
    assert norm(torch.ones(0, 24)).shape == (0, 24)
    assert not _calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False)


def test_it_is_recomputed_and_first_asked_for_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "right")
    block = Block()
    block.weight = block.norm.weight
    expected, exact = results(block), in_float64(block.norm)
    rms_norm.use_device_norms(block, CPU)
    with torch.inference_mode():
        block.norm(torch.ones(1, 24))
    _calls.clear()
    assert_as_accurate(results(block), expected, exact)
    assert _calls == ["right"] * 2
