"""The contract with the installed torch: each private name that rlcore uses still does what its docstring says."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend

from rlcore import _torch_private as base
from rlcore.collectives import _torch_private as of_collectives
from rlcore.devices import _torch_private as of_devices
from rlcore.engines import _torch_private as of_engines
from rlcore.kernels import _torch_private as of_kernels

MODULES = (base, of_collectives, of_devices, of_engines, of_kernels)
CONTRACTS: dict[str, Callable[[], None]] = {}


def contract(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the check of names of the modules above."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CONTRACTS.update(dict.fromkeys(names, check))
        return check

    return register


def documented(source: str) -> Iterator[tuple[str, str]]:
    """Yield the public functions and values of a module with their docstrings; values side by side share one."""
    waiting: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            waiting += [name for name in names if not name.startswith("_")]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from ((name, str(node.value.value)) for name in waiting)
            waiting = []
    yield from ((name, "") for name in waiting)


def breach(check: Callable[[], None], name: str) -> str:
    """Return why the installed torch does not keep the contract of a name, or ""."""
    try:
        check()
    except (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        return (
            f"torch {torch.__version__} does not keep what {name} of _torch_private.py relies on: "
            f"{type(error).__name__}: {error}; correct it there, for the torch versions that rlcore supports"
        )
    return ""


# --------------------------------------------------------------------------------------------------------- base


@contract("Backend")
def backends_have_this_class() -> None:
    assert issubclass(dist.ProcessGroupGloo, base.Backend)


@contract("FileStore", "HashStore", "PrefixStore", "ProcessGroup", "Store", "TCPStore")
def distributed_has_the_same_classes() -> None:
    for name in ("FileStore", "HashStore", "PrefixStore", "ProcessGroup", "Store", "TCPStore"):
        assert getattr(dist, name) is getattr(base, name), name
    assert issubclass(base.FileStore, base.Store)


@contract("TorchDispatchMode")
def a_mode_sees_operations() -> None:
    seen = operations_of(lambda: torch.zeros(2).add_(1))
    assert torch.ops.aten.add_.Tensor in seen


@contract("COPY_TO")
def a_change_of_dtype_is_one_operation() -> None:
    assert operations_of(lambda: torch.zeros(2, device="meta").to(torch.bfloat16))[-1] is base.COPY_TO


@contract("RESHAPE")
def a_reshape_that_copies_ends_with_one_operation() -> None:
    assert operations_of(lambda: torch.zeros(2, 3, device="meta").T.reshape(6))[-1] is base.RESHAPE


@contract("tree_leaves", "tree_map_only")
def trees_are_nested() -> None:
    assert base.tree_leaves([1, (2, {"a": 3})]) == [1, 2, 3]
    assert base.tree_map_only(int, lambda x: x + 1, [1, ("b", {"a": 3})]) == [2, ("b", {"a": 4})]


@contract("storage_key")
def a_storage_keeps_its_key() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    key = base.storage_key(one.untyped_storage())
    assert key == base.storage_key(one[1:].untyped_storage())
    assert key != base.storage_key(other.untyped_storage())
    one.untyped_storage().resize_(0)
    assert key == base.storage_key(one.untyped_storage())


@contract("storage_at")
def a_storage_is_made_of_memory() -> None:
    memory = torch.arange(8, dtype=torch.uint8)
    made = base.storage_at(memory.data_ptr() + 2, memory.device, 4)
    assert torch.empty(0, dtype=torch.uint8).set_(made).tolist() == [2, 3, 4, 5]


@contract("copy_all")
def many_tensors_are_copied() -> None:
    to = [torch.zeros(2), torch.zeros(3)]
    base.copy_all(to, [torch.ones(2), torch.ones(3)], non_blocking=True)
    assert [tensor.tolist() for tensor in to] == [[1.0, 1.0], [1.0, 1.0, 1.0]]


@contract("own_parameters", "own_buffers", "own_modules", "persistent_buffers", "own_tensors")
def tables_of_a_module_may_be_changed() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module[0]
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert list(base.own_modules(module)) == ["0"]
    assert list(base.own_parameters(module)) == []
    base.own_parameters(norm)["weight"] = new = nn.Parameter(torch.zeros(2))
    assert dict(module.named_parameters())["0.weight"] is new
    base.own_buffers(norm)["scratch"] = other = torch.ones(1)
    assert dict(module.named_buffers())["0.scratch"] is other
    assert set(base.persistent_buffers(norm)) == set(norm.state_dict()) - {"weight", "bias"}
    stored = base.own_tensors([module, norm])
    assert [x.data_ptr() for x in stored] == [x.data_ptr() for x in norm.state_dict().values()]


@contract("schedulers_in")
def a_scheduler_tells_which_ones_it_steps() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    first, second = (torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2))
    sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [1])
    assert [*base.schedulers_in(sequence)] == [
        *base.schedulers_in(torch.optim.lr_scheduler.ChainedScheduler([first, second]))
    ]
    assert [*base.schedulers_in(sequence)] == [first, second] and not base.schedulers_in(first)


@contract("schema_of")
def a_schema_tells_what_is_changed() -> None:
    copy = base.schema_of(torch.ops.aten.copy_.default)
    assert [argument.name for argument in copy.arguments] == ["self", "src", "non_blocking"]
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in copy.arguments]
    assert written == [True, False, False]
    assert copy.is_mutable
    assert not base.schema_of(torch.ops.aten.add.Tensor).is_mutable


@contract("strided_split")
def fsdp_over_tensor_parallelism_has_a_placement_of_its_own() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    assert base.strided_split(_StridedShard(0, split_factor=2)) == 2
    assert base.strided_split(Shard(0)) is None
    assert _StridedShard(1, split_factor=2).dim == 1


@contract("root_of")
def a_mesh_of_some_dimensions_knows_the_whole() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))
        assert base.root_of(mesh["shard"]) is mesh and base.root_of(mesh) is mesh
    finally:
        dist.destroy_process_group()


@contract("numbers_of_writes")
def writes_are_counted() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    before = base.numbers_of_writes(tensors)
    tensors[1][1:].add_(1)
    after = base.numbers_of_writes(tensors)
    assert after[0] == before[0] and after[1] > before[1]


@contract("call_after_backward")
def a_callback_runs_after_all_gradients() -> None:
    said: list[str] = []
    leaf = torch.ones((), requires_grad=True)
    last = leaf * 2
    leaf.register_hook(lambda _: said.append("leaf"))
    last.register_hook(lambda _: base.call_after_backward(lambda: said.append("after")))
    last.backward()
    assert said == ["leaf", "after"]


@contract("fake_tensors")
def fake_tensors_have_no_values() -> None:
    with base.fake_tensors():
        made = torch.zeros(1 << 40)
    assert made.device.type == "cpu"
    assert made.shape == (1 << 40,)


@contract("check_can_run_triton")
def a_device_without_triton_raises() -> None:
    for device in ("cpu", "meta"):
        try:
            base.check_can_run_triton(torch.device(device))
        except (ImportError, NotImplementedError, RuntimeError):
            continue
        assert device == "cpu", "the meta device runs triton"


@contract("takes_cudnn")
def attention_tells_its_kernel() -> None:
    query, key = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    assert not base.takes_cudnn(query, key, key)
    chosen = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True)
    assert chosen in {backend.value for backend in SDPBackend.__members__.values()}


@contract("scaled_product")
def rows_and_columns_have_scales() -> None:
    a, b = torch.full((16, 32), 2.0), torch.full((48, 32), 3.0)
    rows, columns = torch.arange(16.0)[:, None], torch.arange(48.0)[None]
    found = base.scaled_product(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T, rows, columns)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (192 * rows * columns).bfloat16())


# -------------------------------------------------------------------------------------------------- collectives


@contract("premul_sum")
def a_factor_makes_a_reduction() -> None:
    assert of_collectives.premul_sum(0.5) == dist.ReduceOp.PREMUL_SUM


@contract("empty_group", "add_backend", "register_group", "unregister_group")
def a_standalone_group_reduces_and_is_found_by_name() -> None:
    assert not dist.is_initialized()
    store = dist.HashStore()
    group = of_collectives.empty_group(store, 0, 1, "gloo")
    backend = dist.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=60))
    of_collectives.add_backend(group, "cpu", "gloo", backend)
    of_collectives.register_group(group, "contract", 1)
    try:
        value = torch.ones(2)
        dist.broadcast(value, src=0, group=group)  # it translates the rank
        dist.all_reduce(value, group=group)
        assert group.group_name == "contract"
        assert dist.get_process_group_ranks(group) == [0]
        assert group not in of_engines.process_groups()
    finally:
        of_collectives.unregister_group(group, "contract")
        group.shutdown()
    assert group not in dist.distributed_c10d._world.pg_group_ranks


# ------------------------------------------------------------------------------------------------------ devices


@contract("registered_backend", "backend_request")
def a_registered_backend_gets_its_request() -> None:
    given: list[tuple[Any, Any]] = []
    name = "rlcorecontract"
    dist.Backend.register_backend(name, lambda *each: given.append(each), extended_api=True, devices=["meta"])
    plugin = of_devices.registered_backend(name)
    assert plugin.extended_api is True
    store = dist.HashStore()
    timeout = timedelta(seconds=7)
    plugin.creator_fn(
        of_devices.backend_request(store=store, rank=1, world_size=3, timeout=timeout, name="group"), None
    )
    ((request, options),) = given
    assert options is None
    assert (request.group_rank, request.group_size, request.group_id) == (1, 3, "group")
    assert (request.timeout, request.global_ranks_in_group) == (timeout, [0, 1, 2])
    assert of_devices.registered_backend("nobody") is None


@contract("gloo_options", "set_timeout")
def gloo_takes_options() -> None:
    options = of_devices.gloo_options(timedelta(seconds=9), hostname="127.0.0.1")
    assert options._timeout == timedelta(seconds=9)
    assert len(options._devices) == 1
    group: Any = dist.ProcessGroupGloo
    group(dist.HashStore(), 0, 1, options).shutdown()


@contract("share_by_descriptor", "storage_of_descriptor")
def shared_memory_has_a_descriptor() -> None:
    tensor = torch.zeros(4)
    descriptor = os.dup(of_devices.share_by_descriptor(tensor.untyped_storage()))
    try:
        other = torch.empty(0).set_(of_devices.storage_of_descriptor(descriptor, tensor.nbytes))
    finally:
        os.close(descriptor)
    tensor.fill_(3)
    assert other.tolist() == [3.0] * 4


@contract("release_ipc_counter")
def a_count_of_receivers_is_named_by_two_values() -> None:
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        release = classmethod(lambda cls, *arguments: asked.append(arguments))
        patch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release)
        of_devices.release_ipc_counter(b"file", 3)
    assert asked == [(b"file", 3)]


# ------------------------------------------------------------------------------------------------------ engines


@contract("process_groups", "num_named_groups", "store_of", "set_default_group")
def the_default_group_can_be_put_aside() -> None:
    before = of_engines.num_named_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        assert of_engines.process_groups() == [own]
        assert of_engines.num_named_groups() > before
        of_engines.store_of(own).set("key", "value")
        assert of_engines.store_of(own).get("key") == b"value"
        of_engines.set_default_group(None, 41)
        assert not dist.is_initialized()
        assert of_engines.num_named_groups() == 41
        of_engines.set_default_group(own, before + 1)
        assert dist.group.WORLD is own
    finally:
        dist.destroy_process_group()
    assert of_engines.process_groups() == []


class _FirstOfTwo(nn.Module):
    """Runs two blocks, and returns the output of the first: the backward begins there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = [block(x) for block in self.blocks]
        return first


@contract("fsdp_pre_backward", "forget_forwards")
def a_list_of_sharded_modules_prepares_its_backward() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = _FirstOfTwo()
        first: Any = module.blocks[0]
        mesh = DeviceMesh("cpu", [0])
        fully_shard(list(module.blocks), mesh=mesh)
        fully_shard(module, mesh=mesh)
        prepare = of_engines.fsdp_pre_backward(first)
        prepared: list[torch.Tensor] = []
        first.register_forward_hook(lambda _, __, output: prepared.append(prepare(output)) or prepared[-1])
        module(torch.ones(1, 2)).sum().backward()
        assert prepared[0].shape == (1, 2)
        assert first.weight.grad.to_local().tolist() == [[1.0, 1.0]] * 2
        if not hasattr(FSDPModule, "reset_iter_state"):
            first._get_fsdp_state()._modules_to_run_forward.add(first)
            of_engines.forget_forwards(first)
            assert not first._get_fsdp_state()._modules_to_run_forward
    finally:
        dist.destroy_process_group()


@contract("drop_unreduced_gradients")
def gradients_that_are_not_exchanged_are_dropped() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype in (torch.bfloat16, torch.float32):  # sums that are kept apart, and gradients of gathered parameters
            module: Any = nn.Linear(2, 2, bias=False)
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            fully_shard(module, mesh=DeviceMesh("cpu", [0]), mp_policy=policy)
            of_engines.drop_unreduced_gradients(module)  # before it has been gathered once
            for is_exchanged in (False, True):
                module.set_requires_gradient_sync(is_exchanged)
                module(torch.ones(1, 2)).sum().backward()
                if not is_exchanged:
                    of_engines.drop_unreduced_gradients(module)
            assert module.weight.grad.to_local().tolist() == [[1.0, 1.0]] * 2
    finally:
        dist.destroy_process_group()


@contract("is_view")
def autograd_knows_views() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    assert of_engines.is_view(tensor[1:])
    assert not of_engines.is_view(tensor)


@contract("divide_all")
def many_tensors_are_divided() -> None:
    tensors = [torch.ones(2), torch.ones(1)]
    of_engines.divide_all(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [0.5]]


@contract("reads_found_inf")
def a_fused_optimizer_skips_by_a_flag() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    assert not of_engines.reads_found_inf(torch.optim.AdamW([weight]))
    optimizer: Any = torch.optim.AdamW([weight], fused=True)
    assert of_engines.reads_found_inf(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@contract("allow_graphs")
def the_compiler_has_a_limit_of_graphs() -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=3):
        of_engines.allow_graphs(5)
        assert torch._dynamo.config.recompile_limit == 5
        of_engines.allow_graphs(4)
        assert torch._dynamo.config.recompile_limit == 5


@contract("is_compiler_off")
def the_compiler_can_be_turned_off() -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(disable=False):
        assert not of_engines.is_compiler_off()
    with torch._dynamo.config.patch(disable=True):
        assert of_engines.is_compiler_off()
        as_it_is = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
        assert as_it_is(torch.zeros(())) == 0


@contract("compile_keeping_less")
def the_compiler_has_the_option() -> None:
    import torch._dynamo
    import torch._functorch.config

    assert torch._functorch.config.ban_recompute_materialized_backward is True
    assert callable(torch._dynamo.lookup_backend("inductor"))


@contract("inductor_as_it_is")
def inductor_has_a_deterministic_mode() -> None:
    import torch._inductor.config

    config: Any = torch._inductor.config
    before = config.deterministic
    with of_engines.inductor_as_it_is():
        config.deterministic = not before
    assert config.deterministic is before


# ------------------------------------------------------------------------------------------------------ kernels


@contract("assert_on_device")
def a_false_value_stops() -> None:
    of_kernels.assert_on_device(torch.tensor(True), "")
    with pytest.raises(RuntimeError, match="why"):  # the host raises at once
        of_kernels.assert_on_device(torch.tensor(False), "why")


@contract("is_compiler_loaded")
def the_compiler_has_a_module_of_its_own() -> None:
    import torch._dynamo

    assert of_kernels.is_compiler_loaded()
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == 1


# ------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", CONTRACTS)
def test_torch_keeps_the_contract_of(name: str) -> None:
    assert breach(CONTRACTS[name], name) == ""


def test_every_private_name_has_a_contract_a_reason_and_a_version() -> None:
    found = [each for module in MODULES for each in documented(inspect.getsource(module))]
    assert sorted(name for name, _ in found) == sorted(CONTRACTS)
    assert [name for name, text in found if not re.search(r"torch 2\.\d+", text)] == []


def test_a_torch_that_lacks_a_name_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    said = breach(CONTRACTS["copy_all"], "copy_all")
    assert said.startswith(f"torch {torch.__version__} does not keep what copy_all of _torch_private.py relies on: ")
    assert "_foreach_copy_" in said


def test_a_torch_that_changes_a_name_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_div_", lambda tensors, divisor: None)
    assert "AssertionError" in breach(CONTRACTS["divide_all"], "divide_all")


@contract("READ_SCALAR")
def a_read_of_a_number_is_one_operation() -> None:
    assert operations_of(lambda: torch.ones(1).item())[-1] is of_engines.READ_SCALAR


@contract("CHANGES_VALUES_ALONE")
def a_fused_step_is_one_operation_in_place() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    assert of_engines.CHANGES_VALUES_ALONE.intersection(operations_of(optimizer.step))


@contract("ADDS_PRODUCT")
def a_product_that_is_added_is_one_operation() -> None:
    seen: list[Any] = []

    class Answering(base.TorchDispatchMode):  # type: ignore[misc,no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return kwargs["out"]

    total, factor = (torch.empty(2, 2, device="meta", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    options: dict[str, Any] = {"out_dtype": torch.float32, "out": total}
    with Answering():
        torch.addmm(total, factor, factor, **options)
    assert seen == [of_engines.ADDS_PRODUCT]


@contract("CHANGED_BY_AUTOGRAD", "reuses_gradient")
def autograd_sums_into_what_nobody_else_has() -> None:
    seen: dict[Any, list[bool]] = {}

    class Asking(base.TorchDispatchMode):  # type: ignore[misc,no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in of_engines.CHANGED_BY_AUTOGRAD:
                seen.setdefault(func, []).append(of_engines.reuses_gradient(args[0]))
            return func(*args, **(kwargs or {}))

    weight = torch.empty(3, 4, device="meta", requires_grad=True)
    rows = torch.zeros(2, dtype=torch.int64)
    with Asking():
        (weight[rows].exp().sum() + (weight * 2).exp().sum()).backward()
    add, put = torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default
    assert seen == {add: [False, True], put: [True]}, seen  # the first sum is the forward's


@contract("HOST_ATTENTION", "FLASH_ATTENTION", "MASKED_ATTENTION")
def fused_attention_holds_no_scores() -> None:
    x = torch.empty(1, 2, 5, 8, device="meta", dtype=torch.bfloat16)
    found = [
        of_engines.HOST_ATTENTION(x, x, x, 0.0, True),
        of_engines.FLASH_ATTENTION(x, x, x, 0.0, True),
        of_engines.MASKED_ATTENTION(x, x, x, None, True),
    ]
    assert [results[0].shape for results in found] == [x.shape] * 3


@contract("device_lists_of_optimizers")
def the_listed_devices_have_fused_optimizers() -> None:
    for owner, name, _ in of_engines.device_lists_of_optimizers():
        assert "xpu" in getattr(owner, name)()


@contract("dump_allocator")
def only_accelerators_have_snapshots() -> None:
    assert not of_engines.dump_allocator("cpu", Path("unused"))
    assert callable(torch.cuda.memory._dump_snapshot)


def operations_of(call: Callable[[], Any]) -> list[Any]:
    seen: list[Any] = []

    class Recorder(base.TorchDispatchMode):  # type: ignore[misc,no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        call()
    return seen
