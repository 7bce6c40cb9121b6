"""The arguments of vLLM engines, and the errors where vLLM cannot start; nothing here needs vLLM."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.vllm import arguments, versions
from rlcore.engines.sampling.vllm import executor as executors
from rlcore.engines.sampling.vllm.executor import VllmExecutor
from rlcore.errors import InvalidInputError, MissingDependencyError, UnsupportedError

FOLDER: Any = SimpleNamespace(path="model", reads_images=False)
KV_CACHE = {"kv_cache_memory_bytes": 1 << 20}
MODULES = ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.llm_engine")
MODULES += ("vllm.device_allocator", "vllm.device_allocator.cumem")
NewEngine = Callable[..., Any]


@pytest.fixture
def seed_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(arguments, "check_arguments", lambda given: None)  # reads vLLM's source

    def seed_of(rank: int, devices: tuple[str, ...], **given: Any) -> int:
        context = WorkerContext("the engine", rank, world_size=2, device_name="cpu:0", number=0, devices=devices)
        found: int = arguments.engine_arguments({**KV_CACHE, **given}, FOLDER, context)["seed"]
        return found

    return seed_of


def test_a_model_that_reads_images_has_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own processors ask for it; texts are read by rlcore all the same."""
    monkeypatch.setattr(arguments, "check_arguments", lambda given: None)  # reads vLLM's source
    context = WorkerContext("the engine", 0, world_size=1, device_name="cpu:0", number=0, devices=("cpu:0",))
    for reads_images in (False, True):
        folder: Any = SimpleNamespace(path="model", reads_images=reads_images)
        found = arguments.engine_arguments(KV_CACHE, folder, context)
        assert found["skip_tokenizer_init"] is not reads_images


def test_prompts_are_computed_whole_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM fails there at a prompt with a seed that is computed in parts; who asks for parts has them."""
    monkeypatch.setattr(arguments, "check_arguments", lambda given: None)  # reads vLLM's source
    context = WorkerContext("the engine", 0, world_size=1, device_name="cpu:0", number=0, devices=("cpu:0",))
    choices = [({}, False), ({"enable_chunked_prefill": True}, True), ({"max_num_batched_tokens": 64}, None)]
    for given, expected in choices:
        found = arguments.engine_arguments(KV_CACHE | given, FOLDER, context)
        assert found.get("enable_chunked_prefill") is expected


def test_a_variable_does_not_overrule_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's build for the CPU reads it."""
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    monkeypatch.setitem(sys.modules, "vllm", None)  # so that it is not imported
    with pytest.raises(MissingDependencyError):
        versions.prepare()
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


@pytest.mark.parametrize(
    ("arch", "given", "expected"), [(90, None, "0"), (90, "1", "1"), (80, None, None), (100, None, None)]
)
def test_scales_of_float8_stay_as_computed_on_hopper_alone(
    monkeypatch: pytest.MonkeyPatch, arch: int, given: str | None, expected: str | None
) -> None:
    """Rounded to powers of two, they would be left to vLLM's loader at each sync; later devices need them so."""
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    others = {variable: value for variable, value in os.environ.items() if variable != name}
    monkeypatch.setattr(os, "environ", others | ({} if given is None else {name: given}))
    monkeypatch.setitem(sys.modules, "vllm", None)  # so that it is not imported
    with pytest.raises(MissingDependencyError):
        versions.prepare(arch=arch)
    assert os.environ.get(name) == expected


def test_each_replica_draws_with_a_seed_of_its_own(seed_of: Callable[..., int]) -> None:
    devices = ("cpu:0", "cpu:1")
    assert [seed_of(rank, devices) for rank in range(3)] == [0, 1, 2]
    assert [seed_of(rank, devices, seed=7) for rank in range(3)] == [7, 8, 9]


def test_all_ranks_of_a_replica_under_torchrun_draw_with_one_seed(
    seed_of: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rank in range(6):
        monkeypatch.setenv("RANK", str(rank))
        found.append(seed_of(rank % 2, (), seed=7))
    assert found == [7, 7, 8, 8, 9, 9]


@pytest.fixture
def allocator() -> SimpleNamespace:
    return SimpleNamespace(pointer_to_data={})


@pytest.fixture
def start(allocator: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> NewEngine:
    """``new_engine`` of a vLLM that takes all arguments and then fails with these words."""

    def start(said: str, **given: Any) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise ValueError(said)

        config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        modules: dict[str, Any] = {name: ModuleType(name) for name in MODULES}
        made = SimpleNamespace(create_engine_config=lambda: config)
        modules["vllm.engine.arg_utils"].EngineArgs = lambda **_: made
        modules["vllm.v1.engine.llm_engine"].LLMEngine = SimpleNamespace(from_vllm_config=fail)
        modules["vllm.device_allocator.cumem"].CuMemAllocator = SimpleNamespace(instance=allocator)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return versions.new_engine(given, rank=0, local_rank=0, folder="")

    return start


def test_a_kv_cache_that_is_too_small_is_raised_by_its_own_argument(start: NewEngine) -> None:
    said = "No available memory. Try increasing `gpu_memory_utilization`."
    advice = " The KV cache has 1048576 bytes a device: `kv_cache_memory_bytes` is what to raise."
    for words, given, told in [(said, KV_CACHE, said + advice), (said, {}, said), ("No.", KV_CACHE, "No.")]:
        with pytest.raises(InvalidInputError) as caught:
            start(words, **given)
        assert str(caught.value) == f"vLLM cannot start with these arguments of build(): {told}"


def test_another_engine_waits_for_the_memory_of_the_last(start: NewEngine, allocator: SimpleNamespace) -> None:
    allocator.pointer_to_data = {address: SimpleNamespace(handle=(0, 1 << 21, address)) for address in (1, 2)}
    with pytest.raises(
        UnsupportedError,
        match=r"^another vLLM engine in this process is not supported: .* has 4194304 bytes of the last one; build",
    ):
        start("")


def test_experts_are_returned_on_gpus_alone(qwen2_folder: Path) -> None:
    executor = VllmExecutor(WorkerContext("the engine", 0, 1, device_name="cpu:0", number=0, devices=("cpu:0",)))
    with pytest.raises(UnsupportedError, match=r"^enable_return_routed_experts on cpu:0 is not supported: vLLM's"):
        executor.build(qwen2_folder, enable_return_routed_experts=True)


@pytest.mark.parametrize("store", ["the folder of all workers of the engine", "ray-store:0"])
def test_each_replica_has_a_folder_of_its_own_for_its_files(
    store: str, monkeypatch: pytest.MonkeyPatch, short_runtime_folder: Path
) -> None:
    """Workers on several hosts meet in what is no folder."""
    monkeypatch.setattr(executors, "check_model_folder", lambda path: FOLDER)
    monkeypatch.setattr(executors, "engine_arguments", lambda given, *_: dict(given))
    monkeypatch.setattr(executors, "PromptReader", lambda *_: None)
    monkeypatch.setattr(versions, "prepare", lambda **_: "0.26")
    monkeypatch.setattr(versions, "check_platform", lambda *_: None)
    new_engine = mock.Mock(side_effect=InvalidInputError("no engine is made"))
    monkeypatch.setattr(versions, "new_engine", new_engine)
    found = []
    for rank in range(2):
        device = f"cpu:{rank}"
        executor = VllmExecutor(WorkerContext("the inference engine", rank, 2, device, 1, (device,), store=store))
        with pytest.raises(InvalidInputError, match="no engine is made"):
            executor.build("model")
        found.append((Path(new_engine.call_args.args[3]), executor))
    assert len({folder for folder, _ in found if folder.is_dir() and folder.parent == short_runtime_folder}) == 2
    for folder, executor in found:
        executor.close()
        assert not folder.exists()
