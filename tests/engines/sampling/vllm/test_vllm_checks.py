"""Wrong arguments are refused before a worker starts; nothing here needs vLLM."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.engines.sampling.replica.engine_identity import environment
from rlcore.engines.sampling.vllm.arguments import check_arguments, engine_arguments
from rlcore.engines.sampling.vllm.target import VARIABLES
from rlcore.errors import CheckpointError, InvalidInputError, MissingDependencyError

ARG_UTILS = """\
    @dataclass
    class EngineArgs:
        model: str = ModelConfig.model
        max_num_seqs: int | None = None
        enforce_eager: bool = False
        tensor_parallel_size: int = 1

        @classmethod
        def from_cli_args(cls): ...

    @dataclass
    class AsyncEngineArgs(EngineArgs):
        enable_log_requests: bool = False
"""
WriteVllm = Callable[[Path], None]


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_workers(*_: Any, **__: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("rlcore.engines.engine.start_workers", start_workers)


@pytest.fixture
def write_vllm() -> WriteVllm:
    """Write the files of vLLM that are read, as a package in a folder; importing it fails."""

    def write(folder: Path) -> None:
        (folder / "vllm" / "engine").mkdir(parents=True)
        (folder / "vllm" / "__init__.py").write_text("raise AssertionError('vLLM was imported')")
        (folder / "vllm" / "engine" / "arg_utils.py").write_text(textwrap.dedent(ARG_UTILS))

    return write


@pytest.fixture
def _vllm_here(
    write_vllm: WriteVllm, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    packages = tmp_path_factory.mktemp("packages")
    write_vllm(packages)
    monkeypatch.syspath_prepend(packages)


def build(path: Path, **options: Any) -> None:
    rlcore.InferenceEngine(path, executor="vllm").build(devices="cpu:0", **options)


@pytest.mark.usefixtures("_vllm_here")
@pytest.mark.parametrize("executor", ["vllm", "hf"])
def test_a_wrong_model_path_is_found_at_once(
    executor: str, tmp_path: Path, write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]
) -> None:
    import transformers

    def build_with(path: Path) -> None:
        rlcore.InferenceEngine(path, executor=executor).build(devices="cpu:0", launcher="process")

    with pytest.raises(CheckpointError, match=r"model path '.*Qwen/Qwen3-8B' is not a folder; rlcore does not"):
        build_with(Path("Qwen/Qwen3-8B"))
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is not a Hugging Face model folder"):
        build_with(tmp_path)
    whole = write_checkpoint(transformers.Qwen2Config(**tiny_config))
    with pytest.raises(AssertionError, match="a worker was started"):
        build_with(whole)
    (whole / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not safetensors"):
        build_with(whole)


def test_what_rlcore_sets_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match="takes no 'worker_cls' for the vllm executor: the workers are rlcore's"
    ):
        build(tmp_path, worker_cls="mine.Worker")


def test_what_rlcore_sets_is_refused_by_a_worker_that_no_engine_checked_for() -> None:
    nothing: Any = None
    with pytest.raises(InvalidInputError, match="takes no 'model' for the vllm executor: it is the engine's path"):
        engine_arguments({"model": "another"}, nothing, nothing)


@pytest.mark.usefixtures("_vllm_here")
@pytest.mark.parametrize(
    ("misspelt", "match"),
    [
        ("max_num_seq", "vLLM has no engine argument 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("colocate_wiht", "vLLM has no engine argument 'colocate_wiht'; did you mean 'colocate_with'?"),  # of build()
        ("enable_log_requests", "'enable_log_requests', and build() takes devices, launcher, colocate_with"),
    ],
)
def test_a_misspelt_engine_argument_is_found_without_importing_vllm(misspelt: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(match)):
        build(tmp_path, max_num_seqs=4, **{misspelt: 1})
    assert "vllm" not in sys.modules


def test_the_vllm_of_another_environment_is_the_one_that_is_asked(tmp_path: Path, write_vllm: WriteVllm) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    write_vllm(tmp_path / "lib" / "python3.11" / "site-packages")
    with pytest.raises(InvalidInputError, match="did you mean 'enforce_eager'"):
        build(tmp_path, python=python, enforce_eagr=True)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        build(tmp_path, python=python, enforce_eager=True)


def test_an_environment_whose_vllm_lies_elsewhere_is_left_to_its_worker(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        build(tmp_path, python=os.fspath(tmp_path / "bin" / "python"), no_such_argument=1)


def test_a_missing_vllm_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "vllm" else found(name, *more))
    with pytest.raises(MissingDependencyError, match=r"the vllm executor needs .* pip install 'rlcore\[vllm\]'"):
        build(tmp_path)


def test_batch_invariant_is_a_choice_of_vllm_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.engines.sampling.vllm.arguments.package_folder", lambda *_: None)
    check_arguments({"batch_invariant": True})
    with pytest.raises(InvalidInputError, match="batch_invariant must be True or False, got 1"):
        check_arguments({"batch_invariant": 1})


@pytest.mark.vllm
def test_every_argument_of_this_vllm_is_known_and_another_is_not(run_python: Any) -> None:
    code = """\
import dataclasses
from vllm.engine.arg_utils import EngineArgs
from rlcore.engines.sampling.vllm.arguments import check_arguments
from rlcore.errors import InvalidInputError

def refusal(name):
    try:
        check_arguments({name: None})
    except InvalidInputError as error:
        return str(error)

names = [field.name for field in dataclasses.fields(EngineArgs)]
refused = [refusal(name) for name in names]
assert len(names) > 100 and sum(told is None for told in refused) > 100
assert all(told is None or told.startswith("build() takes no ") for told in refused), refused
assert refusal("enforce_eagr") == "vLLM has no engine argument 'enforce_eagr'; did you mean 'enforce_eager'?"
"""
    told = run_python(code)
    assert told.returncode == 0, told.stderr


def test_an_engine_is_what_chooses_its_kernels_whatever_its_process_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(VARIABLES)
    monkeypatch.setenv("VLLM_DIST_IDENT", "vllm_dist_1-2-3")
    monkeypatch.setenv("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "vllm_mm_1")
    assert environment(VARIABLES) == before
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert environment(VARIABLES) != before
