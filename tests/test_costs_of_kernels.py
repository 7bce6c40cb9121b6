"""The operators' launches, bytes and multiplications at sizes of training on Hopper, counted without a device.

Tensors have no values, and Triton's kernels are only noted down. Limits are what was counted when each was set: a
change that needs more has to raise them here, and to say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton has no build for this platform")

from rlcore._torch_private import fake_tensors  # noqa: E402
from rlcore.kernels import operands, triton_target  # noqa: E402
from rlcore.kernels.dispatch import choose  # noqa: E402
from rlcore.kernels.linear import head, problem, tiled, triton_tile_gradients, triton_tiles  # noqa: E402
from rlcore.kernels.token import logprob, triton_rows  # noqa: E402
from rlcore.ops import linear_logprob, linear_loss, ppo_clip, token_logprob  # noqa: E402
from tests.counts import Counts, assert_at_most  # noqa: E402

T, H, V = 8192, 4096, 151_936
CORES = 132
GIB = 2**30
PRODUCT = 2 * T * H * V
BYTES_OF_A_LOSS = 22_270_558_360


class Recorded:
    """A kernel that is counted and does nothing."""

    def __init__(self, kernel: Any, counts: Counts) -> None:
        self._kernel, self._counts = kernel, counts

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            given = dict(zip(self._kernel.arg_names, args, strict=False)) | constants
            tensors = [getattr(value, "base", value) for value in given.values()]  # of descriptors
            self._counts.add(self._kernel.__name__, tensors, self._flops(given))

        return run

    def _flops(self, given: dict[str, Any]) -> int:
        if not {"hidden", "weight", "BH", "BV"} <= given.keys():
            return 0
        return 2 * given["T"] * (given["V"] - given.get("first_v", 0)) * given["H"]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Counts with the kernels that a Hopper would run, on tensors without values."""
    found = Counts()
    for module in (triton_rows, triton_tiles, triton_tile_gradients):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorded(kernel, found))
    for refusal in ("rows_refusal", "tiled_refusal"):
        monkeypatch.setattr(triton_target, refusal, lambda query: None)
    for module in (triton_tiles, triton_tile_gradients):
        monkeypatch.setattr(module, "num_cores", lambda device: CORES)
    for module in (operands, logprob, problem, triton_rows):
        monkeypatch.setattr(module, "is_checked_on_device", lambda tensor: True)
    monkeypatch.setattr(head, "_multiplies_into_float32", lambda device_type, dtype, *others: dtype == torch.bfloat16)
    monkeypatch.setattr(tiled, "_aligned", lambda x: x)  # it asks for an address
    choose.cache_clear()
    with fake_tensors():
        yield found
    choose.cache_clear()


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", requires_grad=True)


def head_of_8b() -> tuple[Tensor, Tensor, Tensor]:
    return leaf(T, H), leaf(V, H), torch.empty(T, dtype=torch.int64, device="cpu")


@pytest.mark.parametrize(("num_columns", "dtype"), [(32_000, torch.float32), (128_256, torch.bfloat16)], ids=str)
def test_rows_are_read_once_forward_and_read_and_written_once_backward(
    counts: Counts, num_columns: int, dtype: torch.dtype
) -> None:
    logits, targets = leaf(T, num_columns, dtype=dtype), torch.empty(T, dtype=torch.int64, device="cpu")
    numbers = T * 8 * 8  # at most eight numbers a row
    with counts:
        found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    assert_at_most(counts, launches=3, bytes=logits.nbytes + numbers)
    with counts:
        torch.autograd.grad(found, logits, found)
    assert_at_most(counts, launches=4, bytes=3 * logits.nbytes + 2 * numbers)


@pytest.mark.parametrize(
    ("budget", "launches", "flops"),
    [(3 * GIB, 20, 3 * PRODUCT), (None, 29, 36_661_840_838_656), (GIB // 2, 41, 38_843_684_225_024)],
    ids=str,
)
def test_linear_logprob_multiplies_three_times_where_exponentials_fit(
    counts: Counts, budget: int | None, launches: int, flops: int
) -> None:
    hidden, weight, targets = head_of_8b()
    with counts:
        found = linear_logprob(
            hidden, weight, targets, with_entropy=True, memory_budget_bytes=budget, implementation="tiled"
        )
        torch.autograd.grad(found, (hidden, weight), found)
    assert_at_most(counts, launches=launches, flops=flops)


def test_few_small_kernels_delay_the_product(counts: Counts) -> None:
    """Where the device is idle each takes as long as the host needs to launch it."""
    hidden, weight, targets = head_of_8b()
    with torch.no_grad(), counts:
        linear_logprob(hidden, weight, targets, with_entropy=True, implementation="tiled")
    assert counts.order.index("_statistics_kernel") <= 4
    assert_at_most(counts, launches=12, flops=PRODUCT)


def loss_and_gradients(counts: Counts) -> None:
    hidden, weight, targets = head_of_8b()
    tokens = {name: torch.empty(T, device="cpu") for name in ("old_logprobs", "advantages")}
    with counts:
        found = linear_loss(
            hidden, weight, targets, ppo_clip(), per_token=tokens, token_weight=torch.empty(T, device="cpu"),
            implementation="tiled",
        )  # fmt: skip
        torch.autograd.grad(found.loss, (hidden, weight))


def test_linear_loss_multiplies_three_times(counts: Counts) -> None:
    loss_and_gradients(counts)
    assert_at_most(counts, launches=81, flops=3 * PRODUCT, bytes=BYTES_OF_A_LOSS)


@pytest.mark.parametrize("name", ["exponentials not kept", "one pass more"])
def test_an_operator_that_does_more_is_found(counts: Counts, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate itself, with two defects that no result shows."""
    if name == "exponentials not kept":
        monkeypatch.setattr(tiled, "_unused_accumulator_bytes", lambda inputs: 0)
        monkeypatch.setattr(tiled, "_gradient_bytes", lambda inputs: 0)
        monkeypatch.setattr(tiled, "budget_of", lambda given_bytes, num_rows, device: GIB // 4)
    else:
        real = tiled.dlogits_from_exponentials
        monkeypatch.setattr(tiled, "dlogits_from_exponentials", lambda *args: real(*args).clone())
    loss_and_gradients(counts)
    with pytest.raises(AssertionError, match="this work costs more than it did"):
        assert_at_most(counts, launches=81, flops=3 * PRODUCT, bytes=BYTES_OF_A_LOSS)
