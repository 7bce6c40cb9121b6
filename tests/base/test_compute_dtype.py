"""Computing in another dtype on one device: as FSDP does it, without copies that stay, and parameters as they were."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rlcore.compute_dtype import as_stored, compute_dtype_of, stop_computing
from rlcore.engines.fsdp2 import block_compiler
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.engines.offload.standalone import offloaded
from rlcore.errors import InvalidInputError, StateError
from rlcore.nn import TrainModule
from rlcore.weights.view import whole

WIDTH, ROWS = 8, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, hidden_TH: Tensor, shift: float = 0.0) -> Tensor:
        return hidden_TH + self.down(torch.relu(self.up(hidden_TH * self.scale))) + shift


class Model(TrainModule):
    """Blocks get float32, from a buffer, and must compute in bfloat16 nevertheless."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.register_buffer("position", torch.linspace(0, 1, WIDTH))

    def wrap_classes(self) -> list[str]:
        return ["Block"]

    def hidden_states(self, batch: Any) -> Tensor:
        hidden_TH = self.embed(batch["input_ids"]) + self.position
        for block in self.blocks:
            hidden_TH = block(hidden_TH, shift=0.5)
        return hidden_TH

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.head(self.hidden_states({"input_ids": ids_T}))  # type: ignore[no-any-return]


def make(**options: Any) -> Model:
    """As a train engine's only worker has it."""
    torch.manual_seed(0)
    model = Model()
    sharding = Sharding(compute_dtype="bfloat16", **options)
    shard(model, sharding, torch.device("cpu"), lambda: pytest.fail("nobody to join"), size=1)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss = model(torch.arange(ROWS)).float().square().mean()
    loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


POLICIES: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}, {"activation_checkpointing": "selective"}]
POLICY_NAMES = ["kept", "recomputed", "selective"]
each_policy = pytest.mark.parametrize("options", POLICIES, ids=POLICY_NAMES)


def each_policy_compiled(quick: str) -> pytest.MarkDecorator:
    """The others are left to `make test-all`: the compiler takes longer than all else."""
    pairs = zip(POLICIES, POLICY_NAMES, strict=True)
    params = [pytest.param(x, id=name, marks=() if name == quick else pytest.mark.slow) for x, name in pairs]
    return pytest.mark.parametrize("options", params)


@pytest.mark.usefixtures("alone")
@each_policy
def test_loss_and_gradients_are_those_of_fsdp(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected_model = Model()
    given: Any = {
        "mesh": init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for part in [*expected_model.blocks, expected_model]:
        fully_shard(part, **given)
    register_fsdp_forward_method(expected_model, "hidden_states")
    expected, found = gradients(expected_model), gradients(make(**options))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@each_policy_compiled(quick="selective")
def test_compiled_blocks_compute_the_same_in_one_graph(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(block_compiler, "backend", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    expected, found = gradients(make()), gradients(make(compile=True, **options))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2, "of the first block, which gets float32, and of all others"
    torch.compiler.reset()


class _Casts(TorchDispatchMode):
    """The weights that were cast, while somebody has them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape in ((4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)):
            self.made.append(weakref.ref(result.untyped_storage()))
        return result


@each_policy
def test_no_cast_waits_for_the_backward(options: dict[str, Any]) -> None:
    model = make(**options)
    with _Casts() as casts:
        loss = model(torch.arange(ROWS)).float().sum()
    assert len(casts.made) == 6, "two matrices in each of three blocks"
    assert not [cast for cast in casts.made if cast() is not None]
    loss.backward()


class _Computed(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "products", "relus"), [(False, 0, 0), (True, 3, 3), ("selective", 0, 3)])
def test_selective_checkpointing_makes_again_all_but_products(policy: Any, products: int, relus: int) -> None:
    """On top of what a backward does; a block is made again as far as is needed, so its last product is not."""
    found = []
    for options in ({}, {"activation_checkpointing": policy}):
        loss = make(**options)(torch.arange(ROWS)).float().sum()
        with _Computed() as computed:
            loss.backward()
        again = computed.counts
        found.append((again[torch.ops.aten.addmm] + again[torch.ops.aten.mm], again[torch.ops.aten.relu]))
    assert found[1] == (found[0][0] + products, relus)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="activation_checkpointing must be False, True or 'selective', got 'al"):
        Sharding(activation_checkpointing="all")  # type: ignore[arg-type]


def test_parameters_are_read_in_the_compute_dtype_until_the_backward() -> None:
    model = make()
    names = [name for name, _ in model.named_parameters()]
    kept = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert model.head.weight.dtype == compute_dtype_of(model) == torch.float32
    hidden_TH = model.hidden_states({"input_ids": torch.arange(3)})
    assert hidden_TH.dtype == model.head.weight.dtype == compute_dtype_of(model) == torch.bfloat16
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == kept
    assert set(model.state_dict()) == {*names, "position"}
    model.head(hidden_TH).sum().backward()
    assert model.head.weight is dict(model.named_parameters())["head.weight"]
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.dtype == torch.float32


def test_a_forward_without_backward_is_ended_by_resharding() -> None:
    model = make()
    with torch.no_grad():
        model(torch.arange(3))
    assert model.head.weight.dtype == torch.bfloat16
    stop_computing(model)
    assert model.head.weight.dtype == torch.float32


def test_a_copy_has_parameters_that_can_be_changed() -> None:
    model = make()
    model.hidden_states({"input_ids": torch.arange(3)})
    copied = copy.deepcopy(model.head)
    assert isinstance(copied.weight, nn.Parameter)
    assert copied.weight.dtype == torch.float32
    assert type(model.head).__name__ == "Linear"
    assert isinstance(model.head, nn.Linear)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_policy
def test_a_copy_computes_with_its_own_parameters(options: dict[str, Any], dtype: str) -> None:
    torch.manual_seed(0)
    model = Model()
    shard(model, Sharding(compute_dtype=dtype, **options), torch.device("cpu"), lambda: None, size=1)
    model(torch.arange(ROWS))
    copied = copy.deepcopy(model)
    expected = gradients(copied)
    assert len(expected) == len(list(copied.parameters())) + 1
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in gradients(model).items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.arange(ROWS)).any()


@each_policy
def test_a_block_that_is_called_alone_computes(options: dict[str, Any]) -> None:
    """As one that FSDP shards."""
    block: Any = make(**options).blocks[0]
    hidden_TH = block(torch.ones(3, WIDTH))
    assert hidden_TH.dtype == torch.bfloat16
    hidden_TH.float().sum().backward()
    assert block.up.weight.dtype == block.up.weight.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_a_compiled_block_that_is_called_alone_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_compiler, "backend", "aot_eager")
    torch.compiler.reset()
    block: Any = make(compile=True).blocks[0]
    assert block(torch.ones(3, WIDTH)).dtype == torch.bfloat16
    assert block.up.weight.dtype == torch.float32
    torch.compiler.reset()


class Disabled(Block):
    """What a compiler has to leave out of its graph, which ends before it."""

    def forward(self, hidden_TH: Tensor, shift: float = 0.0) -> Tensor:
        return hidden_TH + self.down(_relu(self.up(hidden_TH * self.scale))) + shift


_relu: Any = torch.compiler.disable(torch.relu)


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@each_policy_compiled(quick="recomputed")
@pytest.mark.parametrize("is_alone", [False, True], ids=["in its tree", "alone"])
def test_a_compiled_block_in_pieces_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_alone: bool
) -> None:
    """Also what is computed again in the backward, outside of any graph."""
    expected_model = make()
    monkeypatch.setattr(block_compiler, "backend", "aot_eager")
    monkeypatch.setitem(globals(), "Block", type("Block", (Disabled,), {}))
    torch.compiler.reset()
    model = make(compile=True, **options)
    for _ in range(2):
        expected, found = ((alone_gradients if is_alone else gradients)(tree) for tree in (expected_model, model))
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        assert model.blocks[0].up.weight.dtype == torch.float32
    torch.compiler.reset()


def alone_gradients(model: Any) -> dict[str, Tensor]:
    """Of one block that is called without its tree."""
    block = model.blocks[0]
    block(torch.linspace(0, 1, WIDTH).expand(3, WIDTH)).float().square().sum().backward()
    return {name: parameter.grad for name, parameter in block.named_parameters()}


class Recomputing(Model):
    """By its own account, and not in a block."""

    def hidden_states(self, batch: Any) -> Tensor:
        hidden_TH: Tensor = checkpoint(self._scaled, super().hidden_states(batch), use_reentrant=False)
        return hidden_TH

    def _scaled(self, hidden_TH: Tensor) -> Tensor:
        return hidden_TH * self.blocks[0].scale


def test_every_backward_computes_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Model", Recomputing)
    expected, model = gradients(make()), make()
    losses = [model(torch.arange(ROWS)).float().square().mean() for _ in range(2)]
    for loss, retain_graph in ((losses[0], True), (losses[1], False), (losses[0], False)):
        loss.backward(retain_graph=retain_graph)
        assert model.head.weight.dtype == torch.float32
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name  # type: ignore[arg-type]
        model.zero_grad()


def test_a_backward_that_fails_is_ended_by_resharding() -> None:
    model = make()
    failing = model.blocks[0].scale.register_hook(lambda _: pytest.fail("as memory runs out"))
    with pytest.raises(pytest.fail.Exception, match="as memory runs out"):
        gradients(model)
    failing.remove()
    stop_computing(model)
    assert model.head.weight.dtype == torch.float32
    model.zero_grad()
    expected = gradients(make())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in gradients(model).items())


def test_a_forward_that_fails_computes_no_more() -> None:
    model = make()
    with pytest.raises(IndexError):
        model(torch.tensor([ROWS]))
    assert model.head.weight is dict(model.named_parameters())["head.weight"]


def test_a_parameter_can_be_replaced_by_whatever_modules_hold() -> None:
    head: Any = make().head
    head.weight = replaced = nn.Parameter(torch.zeros(ROWS, WIDTH))
    assert head.weight is replaced
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        head.register_buffer("weight", torch.zeros(1))
    del head.weight
    assert not hasattr(head, "weight")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
        _ = head.weight
    head.register_buffer("weight", torch.ones(2))
    assert head.weight.tolist() == [1.0, 1.0]
    del head.weight
    head.weight = torch.ones(3)  # as torch's older weight_norm computes it
    assert head.weight.tolist() == [1.0, 1.0, 1.0]
    del head.weight
    head.register_parameter("weight", replaced)
    assert head.weight is replaced


def test_weights_may_leave_between_forward_and_backward_but_not_in_the_backward() -> None:
    expected, model = gradients(make()), make()
    loss = model(torch.arange(ROWS)).float().square().mean()
    with offloaded(model), pytest.raises(StateError, match="needs weights that are away; bring them back first"):
        loss.backward()
    model.zero_grad()
    loss = model(torch.arange(ROWS)).float().square().mean()
    with offloaded(model):
        pass
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name  # type: ignore[arg-type]


def test_what_is_frozen_is_not_cast() -> None:
    torch.manual_seed(0)
    model = Model()
    model.head.requires_grad_(False)
    shard(model, Sharding(compute_dtype="bfloat16"), torch.device("cpu"), lambda: None, size=1)
    assert type(model.head) is nn.Linear
    assert model.head.weight.dtype == torch.bfloat16
    assert set(gradients(model)) == {name for name, _ in model.named_parameters()} - {"head.weight"} | {"loss"}


def test_a_computing_module_is_read_as_stored_where_that_is_asked_for() -> None:
    model = make()
    with as_stored(model):
        assert model.head.weight.dtype == torch.float32
    model(torch.arange(ROWS))
    assert model.head.weight.dtype == torch.bfloat16  # until the end of a backward
    with pytest.raises(KeyError), as_stored(model):
        assert model.head.weight.dtype == torch.float32
        raise KeyError
    assert model.head.weight.dtype == torch.bfloat16
    stop_computing(model)
    with as_stored(nn.Linear(2, 2)) as nothing:
        assert nothing is None
