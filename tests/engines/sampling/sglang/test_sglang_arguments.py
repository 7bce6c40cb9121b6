"""The arguments of SGLang engines; nothing here needs SGLang."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import rlcore
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.sglang import arguments, versions
from rlcore.engines.sampling.sglang import executor as executors
from rlcore.engines.sampling.sglang.executor import SglangExecutor
from rlcore.engines.sampling.sglang.scheduler_process import _WORDS
from rlcore.engines.sampling.sglang.scheduler_process import FOLDER as FOLDER_VARIABLE
from rlcore.errors import CheckpointError, InvalidInputError, MissingDependencyError, UnsupportedError
from rlcore.process.guard import FAMILY

FOLDER: Any = SimpleNamespace(path="model")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An interpreter beside the source of an SGLang of later versions, as far as names are read from it."""
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang" / "srt"
    (package / "arg_groups" / "fields").mkdir(parents=True)
    (package / "server_args.py").write_text("class ServerArgs:\n    dtype: str = 'auto'\n")
    (package / "arg_groups" / "fields" / "cache.py").write_text("class Cache:\n    max_total_tokens: int = 1\n")
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin" / "python"


@pytest.fixture
def new_engine(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Takes what ``build()`` would make SGLang's engine with, and makes none."""
    monkeypatch.setattr(executors, "check_model_folder", lambda path: FOLDER)
    monkeypatch.setattr(executors, "engine_arguments", lambda given, *_: dict(given))
    monkeypatch.setattr(versions, "prepare", lambda *_: "0.5.21")
    monkeypatch.setattr(executors, "PromptReader", lambda *_: None)
    monkeypatch.setattr(executors.signal, "signal", lambda *_: None)
    monkeypatch.setattr(executors, "WorkerProcesses", mock.MagicMock())
    monkeypatch.setattr(executors, "EngineThread", lambda make: make())
    taken = mock.Mock(side_effect=InvalidInputError("no engine is made"))
    monkeypatch.setattr(versions, "new_engine", taken)
    return taken


def test_an_unknown_argument_names_the_nearest(environment: Path) -> None:
    arguments.check_arguments({"dtype": "float32", "max_total_tokens": 5}, environment)
    with pytest.raises(
        InvalidInputError, match="SGLang has no engine argument 'max_total_token'; did you mean 'max_to"
    ):
        arguments.check_arguments({"max_total_token": 5}, environment)


@pytest.mark.parametrize("name", arguments._OWN)
def test_what_rlcore_sets_is_refused_with_a_reason(name: str, environment: Path) -> None:
    with pytest.raises(InvalidInputError, match=rf"^build\(\) takes no '{name}' for the sglang executor: \w.* \w"):
        arguments.check_arguments({name: 1}, environment)


def test_the_folder_is_looked_at_before_a_worker_starts(environment: Path, tmp_path: Path) -> None:
    engine = rlcore.InferenceEngine(tmp_path, executor="sglang")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        engine.build(devices="cpu:0", python=str(environment), dtype="float32")


def test_a_missing_sglang_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "sglang" else found(name, *more)
    )
    with pytest.raises(MissingDependencyError, match=r"the sglang executor needs .* pip install 'rlcore\[sglang\]'"):
        rlcore.InferenceEngine(tmp_path, executor="sglang").build(devices="cpu:0")


def test_each_replica_draws_with_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "check_arguments", lambda given: None)  # reads SGLang's source
    found = []
    for rank in range(3):
        context = WorkerContext("it", rank, world_size=3, device_name="cpu:0", number=0, devices=("cpu:0", "cpu:1"))
        made = arguments.engine_arguments({"random_seed": 7, "max_total_tokens": 99}, FOLDER, context)
        assert (made["tp_size"], made["device"], made["max_total_tokens"]) == (2, "cpu", 99)
        found.append(made["random_seed"])
    assert found == [7, 8, 9]


def test_both_ends_of_a_communicator_have_the_same_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang turns off what is not set; the trainer's process has what the user sets, else NCCL's default."""
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.21"))  # type: ignore[arg-type]
    device: Any = SimpleNamespace(spec=SimpleNamespace(is_host=False))
    with mock.patch.dict(os.environ, {"NCCL_CUMEM_ENABLE": "0"}), warnings.catch_warnings():
        versions.prepare(device, 1)
        assert os.environ["NCCL_CUMEM_ENABLE"] == "0", "the user's"
        del os.environ["NCCL_CUMEM_ENABLE"]
        versions.prepare(device, 1)
        assert os.environ["NCCL_CUMEM_ENABLE"] == "-2", "NCCL's default: what the machine can"


@pytest.mark.parametrize(
    ("capability", "has_flash_attention", "expected"),
    [("9.0", False, "triton"), ("9.0", True, None), ("8.9", False, None), ("10.0", False, None)],
)
def test_without_flash_attention_a_hopper_takes_tritons(
    capability: str,
    has_flash_attention: bool,
    expected: str | None,
    new_engine: mock.Mock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang asks for FlashAttention 3 there alone, and would fail: "Can not import FA3 in sgl_kernel"."""
    found = importlib.util.find_spec
    kernels = SimpleNamespace() if has_flash_attention else None
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: kernels if "flash_ops" in name else found(name, *more)
    )
    device = SimpleNamespace(
        spec=SimpleNamespace(is_host=False), properties=lambda: SimpleNamespace(capability=capability)
    )
    executor: Any = mock.MagicMock(context=None, device=device, _num_shards=1)
    for given, taken in ({}, expected), ({"attention_backend": "flashinfer"}, "flashinfer"):
        with mock.patch.dict(os.environ), pytest.raises(InvalidInputError, match="no engine is made"):
            SglangExecutor.build(executor, "model", **given)
        assert new_engine.call_args.args[0].get("attention_backend") == taken


def test_a_build_that_fails_when_the_schedulers_run_leaves_no_shared_memory(
    new_engine: mock.Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As for a model that SGLang fills in part: schedulers are killed, and cannot remove it."""
    shared = Path(f"/dev/shm/sglang_loads_{tmp_path.parent.name}_{os.getpid()}.shm")
    shared.write_bytes(bytes(4096))
    code = "import mmap, os, sys; it = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0); print(); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(shared)]
    monkeypatch.setenv(FAMILY, "a family of its own")
    monkeypatch.setattr(executors, "ShardCalls", mock.Mock(side_effect=UnsupportedError("it", "a part of it is none")))
    new_engine.side_effect = None
    executor = SglangExecutor(WorkerContext("the inference engine", 0, 1, "cpu:0", 1))
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as scheduler:
            assert scheduler.stdout is not None and scheduler.stdout.readline()
            monkeypatch.setattr(executors, "active_children", lambda: [scheduler])
            with mock.patch.dict(os.environ), pytest.raises(UnsupportedError):
                executor.build("model", attention_backend="triton")
        executor.close()
        assert not shared.exists()
    finally:
        shared.unlink(missing_ok=True)


@pytest.mark.parametrize("store", ["the folder of all workers of the engine", "ray-store:0"])
def test_each_replica_has_a_folder_of_its_own_for_its_sockets(
    store: str, new_engine: mock.Mock, monkeypatch: pytest.MonkeyPatch, short_runtime_folder: Path
) -> None:
    """Replicas on one host would bind the same names in that of the workers, and on several hosts it is none."""
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    monkeypatch.setattr(executors, "remove_memory", lambda files: None)  # only a worker's process can tell its own
    found = []
    for rank in range(2):
        executor = SglangExecutor(WorkerContext("the inference engine", rank, 2, f"cpu:{rank}", 1, store=store))
        with mock.patch.dict(os.environ), pytest.raises(InvalidInputError, match="no engine is made"):
            executor.build("model", attention_backend="triton")
        found.append((Path(new_engine.call_args.args[1]), executor))
    assert len({folder for folder, _ in found if folder.is_dir() and folder.parent == short_runtime_folder}) == 2
    for folder, executor in found:
        executor.close()
        assert not folder.exists()


def test_the_last_words_of_a_scheduler_are_read_in_the_folder_of_its_own_replica(
    new_engine: mock.Mock, monkeypatch: pytest.MonkeyPatch, short_runtime_folder: Path
) -> None:
    """Two executors in one process: the variable names the folder of the later."""
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    monkeypatch.setattr(executors, "remove_memory", lambda files: None)  # only a worker's process can tell its own
    made = [SglangExecutor(WorkerContext("the inference engine", 0, 1, "cpu:0", 1)) for _ in range(2)]
    with mock.patch.dict(os.environ):
        for number, executor in enumerate(made):
            with pytest.raises(InvalidInputError, match="no engine is made"):
                executor.build("model", attention_backend="triton")
            Path(os.environ[FOLDER_VARIABLE], f"{_WORDS}7").write_text(f"words of {number}")
        name_of: Any = executors.WorkerProcesses.call_args_list[0].args[2]  # type: ignore[attr-defined]
        assert name_of(SimpleNamespace(pid=7)).endswith("after 'words of 0'")
    for executor in made:
        executor.close()


def test_experts_of_a_host_are_refused_where_sglang_would_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(name="cpu:0", spec=SimpleNamespace(is_host=True))
    executor: Any = SimpleNamespace(context=None, device=host, _num_shards=1)
    monkeypatch.setattr(executors, "check_model_folder", lambda path: FOLDER)
    monkeypatch.setattr(executors, "engine_arguments", lambda *_: {})
    monkeypatch.setattr(versions, "prepare", lambda *_: "0.5.20.post1")
    told = (
        r"^enable_return_routed_experts on cpu:0 is not supported: SGLang 0\.5\.20\.post1 pins its memory for them, "
        r"which takes CUDA; run: pip install 'sglang>=0\.5\.21', or sample by executor='hf', or on a GPU$"
    )
    with pytest.raises(UnsupportedError, match=told):
        SglangExecutor.build(executor, "model", enable_return_routed_experts=True)
    versions.check_experts_of_host("it", "0.5.21", "cpu:0")


@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_float32_on_a_gpu_is_refused_before_sglang_is_imported(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel of RMSNorm would fail in the scheduler, after minutes: "failed to dispatch data type Float"."""
    monkeypatch.setattr(arguments, "check_arguments", lambda given: None)  # reads SGLang's source
    gpu: Any = SimpleNamespace(
        rank=0,
        devices=("cuda:0",),
        device_name="cuda:0",
        device=SimpleNamespace(torch_device=torch.device("cuda:0"), index=0, spec=SimpleNamespace(is_host=False)),
    )
    told = (
        rf"^dtype='{dtype}' of the sglang executor on cuda:0 is not supported: SGLang's kernels for GPUs have bfloat16 "
        r"and float16 alone; give build\(dtype=\"bfloat16\"\), or take the executor hf or vllm$"
    )
    with pytest.raises(UnsupportedError, match=told):
        arguments.engine_arguments({"dtype": dtype}, FOLDER, gpu)
    executor: Any = SimpleNamespace(context=gpu, device=gpu.device, _num_shards=1)
    monkeypatch.setattr(executors, "check_model_folder", lambda path: FOLDER)
    monkeypatch.setattr(versions, "prepare", lambda *_: pytest.fail("SGLang was imported"))
    with pytest.raises(UnsupportedError):
        SglangExecutor.build(executor, "model", dtype=dtype)
    assert arguments.engine_arguments({"dtype": "bfloat16"}, FOLDER, gpu)["dtype"] == "bfloat16"


def test_arguments_in_words_are_those_that_choose_how_weights_lie(tmp_path: Path) -> None:
    places = tmp_path / "places.json"
    places.write_text("[0, 1]")
    given = {
        "model_path": "/one",
        "random_seed": 1,
        "moe_runner_backend": "triton",
        "init_expert_location": str(places),
    }
    before = arguments.in_words(given)
    assert arguments.in_words(given | {"model_path": "/another", "random_seed": 2}) == before
    assert arguments.in_words(given | {"moe_runner_backend": "flashinfer"}) != before
    places.write_text("[1, 0]")
    assert arguments.in_words(given) != before
