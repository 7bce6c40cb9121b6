"""Products of float8: each is that of its rounded operands; parameters stay as they are; what cannot do it says why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rlcore import float8_linear
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.float8_linear import Float8Linear, use_float8
from rlcore.nn import TrainModule
from tests.accuracy import assert_as_accurate, assert_same_bits, assert_within_rounding

CPU = torch.device("cpu")
WIDTH = 256


def drawn(*shape: int) -> Tensor:
    """Rows of very different sizes, one of them 0."""
    values = torch.randn(shape) * torch.logspace(-6, 3, shape[0])[:, None]
    values[3] = 0
    return values.bfloat16()


def rounded(x: Tensor, dim: int) -> Tensor:
    """The definition: along ``dim`` nothing is above 448 of the scale, and three bits of mantissa are kept."""
    scale = x.float().abs().amax(dim, keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


@pytest.mark.parametrize("num_rows", [48, 37], ids=["48 tokens", "37 tokens"])
def test_the_three_products_are_those_of_rounded_operands(num_rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
    use_float8([nn.ModuleList([layer])], CPU)
    x, weight = drawn(num_rows, WIDTH).requires_grad_(), layer.weight
    dy = drawn(num_rows, 2 * WIDTH)
    y = layer(x[None])[0]
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None and layer.bias.grad is not None
    found = [(y - layer.bias).detach(), x.grad, weight.grad]
    operands = [(x.detach(), weight.detach().T), (dy, weight.detach()), (dy.T, x.detach())]
    exact = [rounded(one, 1) @ rounded(other, 0) for one, other in operands]
    assert_as_accurate(found[1:], [x.bfloat16() for x in exact[1:]], exact[1:])
    with_bias = exact[0] + layer.bias.double()
    assert_as_accurate(y, exact[0].bfloat16() + layer.bias, with_bias)
    assert_within_rounding(layer.bias.grad, dy.double().sum(0), terms=num_rows, magnitude=dy.double().abs().sum(0),
                           dtype=torch.bfloat16)  # fmt: skip


def test_a_value_that_is_not_finite_reaches_the_results() -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    use_float8([nn.ModuleList([layer])], CPU)
    x = torch.ones(32, WIDTH, dtype=torch.bfloat16)
    x[1, 0], x[2, 0] = float("nan"), float("inf")
    y = layer(x)
    assert y[0].isfinite().all() and y[1].isnan().all() and not y[2].isfinite().any()


def test_only_wide_linear_layers_change_and_compute_as_before_in_other_dtypes() -> None:
    block = nn.ModuleDict(
        {
            "wide": nn.Linear(WIDTH, WIDTH),
            "router": nn.Linear(WIDTH, 8),
            "uneven": nn.Linear(WIDTH + 8, WIDTH),
            "embedding": nn.Embedding(WIDTH, WIDTH),
        }
    )
    before = {name: type(layer) for name, layer in block.items()}
    use_float8([block], CPU)
    assert {name for name, layer in block.items() if type(layer) is not before[name]} == {"wide"}
    x, wide = torch.randn(5, WIDTH), block["wide"]
    assert isinstance(wide, Float8Linear)
    assert_same_bits(wide(x), nn.functional.linear(x, wide.weight, wide.bias))
    assert type(copy.deepcopy(wide)) is Float8Linear


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        return hidden_TH + self.down(torch.relu(self.up(hidden_TH)))


class Model(TrainModule):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, width, bias=False)

    def wrap_classes(self) -> list[str]:
        return ["Block"]

    def forward(self, hidden_TH: Tensor) -> Tensor:
        for block in self.blocks:
            hidden_TH = block(hidden_TH)
        return self.head(hidden_TH)  # type: ignore[no-any-return]


def make(**options: object) -> Model:
    torch.manual_seed(0)
    model = Model()
    shard(model, Sharding(**options), CPU, lambda: pytest.fail("nobody to join"), size=1)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_alone_multiply_in_float8_and_parameters_stay_float32(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[tuple[int, ...]] = []
    real = float8_linear.scaled_product
    model = make(compute_dtype="float8", activation_checkpointing=recompute)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    monkeypatch.setattr(
        float8_linear, "scaled_product", lambda *args: (products.append(tuple(args[0].shape)), real(*args))[1]
    )
    model(torch.randn(32, WIDTH)).float().square().mean().backward()
    assert len(products) == (4 if recompute else 3) * 4 - 1  # nothing asks for the gradient of the first layer's input
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), before[name], name)
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert not isinstance(model.head, Float8Linear)


def test_a_device_without_such_products_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Tensor) -> Tensor:
        raise RuntimeError("scaled_mm needs compute capability 9.0\nstack")

    monkeypatch.setattr(float8_linear, "scaled_product", refuse)
    with pytest.raises(
        UnsupportedError, match=r"compute_dtype='float8' on cpu is not supported: .*capability 9.0\); use .*'bfloat16'"
    ):
        make(compute_dtype="float8")
    monkeypatch.setattr(float8_linear, "scaled_product", lambda a, b, *scales: torch.zeros(16, 16))
    with pytest.raises(UnsupportedError, match="is wrong; use compute_dtype='bfloat16'"):
        make(compute_dtype="float8")


def test_a_module_without_wide_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no torch.nn.Linear inside the blocks .* at least 256"):
        shard(Model(64), Sharding(compute_dtype="float8"), CPU, lambda: None, size=1)


def test_float8_is_no_dtype_of_parameters() -> None:
    with pytest.raises(InvalidInputError, match=r"^dtype must be one of float32, bfloat16, got 'float8'"):
        Sharding(dtype="float8")
    with pytest.raises(InvalidInputError, match=r"^compute_dtype must be one of float32, bfloat16, float8, got 'fp8'"):
        Sharding(compute_dtype="fp8")
