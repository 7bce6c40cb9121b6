"""A module's blocks are one graph of their own, which keeps for its backward what is dear to make again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.engines.fsdp2 import block_compiler
from rlcore.engines.fsdp2.block_compiler import BlockCompiler
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.nn import TrainModule
from tests.accuracy import assert_as_accurate, assert_within_rounding


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs_run(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Return the graphs that were compiled and run, in order."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            found.append(graph)
            return graph(*args)

        return run

    monkeypatch.setattr(block_compiler, "backend", backend)
    return found


class Block(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, size)

    def forward(self, input_TH: Tensor) -> Tensor:
        return self.linear(input_TH)  # type: ignore[no-any-return]


class Blocks(TrainModule):
    """Two of them, one behind the other."""

    def __init__(self, cls: Any, size: int) -> None:
        super().__init__()
        self._cls = cls
        self.both = torch.nn.Sequential(cls(size), cls(size))

    def wrap_classes(self) -> list[str]:
        return [self._cls.__name__]

    def hidden_states(self, batch: Any) -> Tensor:
        return self.both(batch)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_blocks_of_many_engines_in_a_process_stay_compiled(graphs_run: list[torch.fx.GraphModule]) -> None:
    different: set[int] = set()
    for size in (16, 32, 48):
        module = Blocks(Block, size)
        shard(module, Sharding(compile=True), torch.device("cpu"), lambda: None, size=1)
        for num_tokens in (5, 7):  # graphs for the first, and for any number
            graphs_run.clear()
            module.both(torch.zeros(num_tokens, size, requires_grad=True))
            assert len(graphs_run) == 2, "each block is one"
            different |= {id(graph) for graph in graphs_run}
    assert len(different) == 6, "an engine's sizes are not those of another that changed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_blocks_have_more_graphs_than_the_compiler_keeps_by_itself(graphs_run: list[torch.fx.GraphModule]) -> None:
    def forward(module: Any, input_T: Tensor) -> Tensor:
        return input_T + len(module.kind)

    call = BlockCompiler().compiled(forward, SimpleNamespace)
    for count in range(10):
        assert call(SimpleNamespace(kind="k" * count), torch.zeros(2)).tolist() == [count] * 2
    assert len({id(graph) for graph in graphs_run}) == 10


class GatedBlock(torch.nn.Module):
    """A block like a decoder's: 3 products, and between them operators that only read and write memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(size, eps=1e-6)
        self.gate, self.up = torch.nn.Linear(size, 4 * size, bias=False), torch.nn.Linear(size, 4 * size, bias=False)
        self.down = torch.nn.Linear(4 * size, size, bias=False)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        normed_TH = self.norm(hidden_TH)
        gated = torch.nn.functional.silu(self.gate(normed_TH)) * self.up(normed_TH)
        return hidden_TH + self.down(gated)  # type: ignore[no-any-return]


def kept_and_gradients(device: torch.device, **options: Any) -> tuple[int, list[Tensor]]:
    """Bytes besides the parameters that wait for the backward of two blocks, and what it gives."""
    torch.manual_seed(0)
    module, kept = Blocks(GatedBlock, SIZE), dict[int, int]()
    module.to(device)
    shard(module, Sharding(compute_dtype="bfloat16", **options), device, lambda: None, size=1)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    input_TH = torch.randn(TOKENS, SIZE).to(device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TH = module.hidden_states(input_TH)
    hidden_TH.float().square().mean().backward()
    return sum(kept.values()), [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def exact_gradients() -> list[Tensor]:
    """Return the gradients of ``kept_and_gradients`` in float64."""
    torch.manual_seed(0)
    module = Blocks(GatedBlock, SIZE).double()
    module.both(torch.randn(TOKENS, SIZE).double()).square().mean().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


SIZE, TOKENS = 64, 96
NEEDED = 2 * TOKENS * SIZE * (1 + 4 + 4) * 2
"""Bytes of two blocks' inputs, gates and ups in bfloat16."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_a_graph_keeps_what_products_gave_and_no_more(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    """Neither norms, nor the activation, nor weights in the compute dtype: the backward makes them again."""
    place = device.torch_device
    if place.type == "cpu":  # the choice of what to keep is Inductor's, without the code it writes
        partition = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
        monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: partition)
    kept, found = kept_and_gradients(place, compile=True)
    with torch.compiler.set_stance("force_eager"):
        _, uncompiled = kept_and_gradients(place, compile=True)
    for gradients in zip(found, uncompiled, exact_gradients(), strict=True):
        assert_as_accurate(*gradients)
    assert NEEDED <= kept < 1.1 * NEEDED


class DroppingBlock(torch.nn.Module):
    """A block whose output is what its second product reads; the gradient sums it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(size, size, bias=False), torch.nn.Linear(size, size, bias=False)
        torch.nn.init.eye_(self.down.weight)

    def forward(self, input_TH: Tensor) -> Tensor:
        return self.down(torch.nn.functional.dropout(self.up(input_TH).square(), 0.5))  # type: ignore[no-any-return]


class DroppingBlocks(TrainModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.one = torch.nn.Sequential(DroppingBlock(size))

    def wrap_classes(self) -> list[str]:
        return ["DroppingBlock"]


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_what_is_random_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    place = device.torch_device
    if place.type == "cpu":
        partition = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
        monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: partition)
    torch.manual_seed(0)
    module = DroppingBlocks(SIZE).to(place)
    shard(module, Sharding(compile=True), place, lambda: None, size=1)
    result_TH = module.one(torch.randn(TOKENS, SIZE, device=place))
    result_TH.sum().backward()
    read_H = module.one[0].down.weight.grad[0]
    exact_TH = result_TH.detach().double()
    assert_within_rounding(read_H, exact_TH.sum(0), terms=TOKENS, magnitude=exact_TH.abs().sum(0))
    assert 0.4 < float((result_TH == 0).float().mean()) < 0.6
