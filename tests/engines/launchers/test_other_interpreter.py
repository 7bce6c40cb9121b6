"""Workers that another interpreter runs: what they are sent is plain data, and what they answer is right."""

from __future__ import annotations

import enum
import pickle
import site
import sys
import venv
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

import rlcore
from rlcore.engines.launchers.interpreter import checked_interpreter
from rlcore.engines.launchers.messages import WorkerReference
from rlcore.engines.launchers.plain_calls import dump_plain_call, import_path, load_plain_call
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.residency import Move
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.nn import HuggingFaceTrainModule

PROMPTS, GREEDY = ["1+1=", "90210-777="], {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an environment that has the packages of this one."""
    folder = tmp_path_factory.mktemp("other") / "env"
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "parent.pth").write_text("\n".join(f"import site; site.addsitedir({path!a})" for path in parents))
    return str(folder / "bin" / "python")


# ------------------------------------------------------------------------------------------------------ plain data


class Pair(NamedTuple):
    left: int
    right: Any


class Size(msgspec.Struct):
    width: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    name: str
    size: Size
    note: str = "none"
    local: object = field(default_factory=object, compare=False)


class Colour(enum.Enum):
    RED = "r"


VALUES = [
    None, True, -3, 2.5, float("inf"), "text", b"\0bytes", [], [1, 2, 3], [1, [2]], ["scalars", 1], (), (1, (2, [3])),
    {}, {"a": [1]}, {1: {"b": (2,)}, (3, 4): None}, {1, 2}, frozenset({"x"}), Path("/a/b"), SamplingParams(n=3),
    Pair(1, {"k": Pair(2, [None])}), Task("a", Size(3, (1, 2))), Task("b", Size(1), note="x"), Move.OFFLOAD,
    Colour.RED, torch.bfloat16, dict, SamplingParams, import_path,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_sent_arrives_as_it_was(value: Any) -> None:
    body, tensors = dump_plain_call(("method", (value,), {"key": value}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "loads", None)
        patch.setattr(pickle, "Unpickler", None)
        method, (positional,), keywords = load_plain_call(body, tensors, {})
    assert (method, positional, keywords) == ("method", value, {"key": value})
    assert type(positional) is type(value)


def test_tensors_workers_and_numbers_of_numpy() -> None:
    small, large = torch.arange(6).view(2, 3).t(), torch.randn(40_000)
    worker = object()
    call = [small, {"large": large, "again": torch.ones((), dtype=torch.bfloat16)}, WorkerReference(4), np.int64(7)]
    body, tensors = dump_plain_call(call)
    assert len(tensors) == 1 and len(body) < 2000
    found = load_plain_call(body, tensors, {4: worker})
    assert torch.equal(found[0], small) and found[0].dtype == small.dtype
    assert torch.equal(found[1]["large"], large) and found[1]["again"] == 1
    assert found[2] is worker and found[3] == 7


def test_a_context_leaves_what_is_the_senders_own() -> None:
    context = WorkerContext("the engine", 1, 2, "cpu:0", 3, ("cpu:0", "cpu:1"))
    found = load_plain_call(*dump_plain_call(context), {})
    assert found == context and found.world is not context.world


Nowhere = namedtuple("Somewhere", "x")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: 0, "has no import path, and code does not travel; put it into a module that is installed there"),
        (Nowhere(1), "Somewhere cannot be sent to another interpreter: it has no import path"),
        (object(), "a builtins.object cannot be sent to another interpreter, which takes numbers"),
        (np.zeros(2), "a numpy.ndarray cannot be sent"),
        (2**70, r"an argument cannot be sent to another interpreter: .*2\*\*63"),
        (
            torch.empty(1, device="meta"),
            "cannot be sent to another interpreter: Tensor of layout torch.strided on meta",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        dump_plain_call([value])


def test_a_path_of_this_program_is_no_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "__module__", "__main__")
    with pytest.raises(InvalidInputError, match="__main__:Task cannot be sent to another interpreter"):
        import_path(Task)


# ---------------------------------------------------------------------------------------------------- interpreters


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "is no program; give the bin/python of an environment"),
        ("echo no such option >&2; exit 2", r"cannot import rlcore \(no such option\); install rlcore .* there: .*pip"),
        ("echo 0.0.0", f"has rlcore 0.0.0, and this is {rlcore.__version__}; install rlcore"),
    ],
)
def test_an_interpreter_without_this_rlcore_is_refused(tmp_path: Path, script: str | None, reason: str) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    with pytest.raises(InvalidInputError, match=reason):
        checked_interpreter(python)


def test_a_name_on_the_path_will_do(monkeypatch: pytest.MonkeyPatch, other_python: str) -> None:
    monkeypatch.setenv("PATH", str(PurePosixPath(other_python).parent))
    assert checked_interpreter("python") == other_python


# --------------------------------------------------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def engines(qwen2_folder: Path, other_python: str) -> Iterator[tuple[rlcore.InferenceEngine, rlcore.InferenceEngine]]:
    """A sampler of the other interpreter, and one of this."""
    with rlcore.InferenceEngine(qwen2_folder) as there, rlcore.InferenceEngine(qwen2_folder) as here:
        yield there.build(devices="cpu", python=other_python, timeout_s=100), here.build(devices="cpu")


@pytest.mark.slow
def test_a_sampler_of_another_interpreter_gives_the_same(engines: Any, other_python: str) -> None:
    there, here = engines
    (worker,) = there.executors[0].workers
    command = Path(f"/proc/{worker.process_id}/cmdline").read_bytes().split(b"\0")
    assert command[0].decode() == other_python != sys.executable
    found, expected = there.generate(PROMPTS, GREEDY), here.generate(PROMPTS, GREEDY)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert there.offload()["weights"][0].freed_device_bytes > 0
    there.onload()
    assert there.generate(PROMPTS, SamplingParams(**GREEDY))[0].outputs[0].text == found[0].outputs[0].text


@pytest.mark.slow
def test_weights_arrive_from_this_interpreter(engines: Any, qwen2_folder: Path) -> None:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            with torch.no_grad():
                self.model.norm.weight.mul_(-1.5)

    with rlcore.meta_device():
        module = Policy.from_pretrained(qwen2_folder)
    there, here = engines
    with rlcore.TrainEngine(module) as train:
        train.build(devices="cpu")
        before = there.generate(PROMPTS, GREEDY)
        for infer in (there, here):
            assert train.sync_weights(infer).fallback_bytes == 0
        found, expected = there.generate(PROMPTS, GREEDY), here.generate(PROMPTS, GREEDY)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
        assert [one.outputs[0].token_ids for one in found] != [one.outputs[0].token_ids for one in before]


def test_a_trainer_runs_the_users_code_and_takes_no_other_interpreter(qwen2_folder: Path, other_python: str) -> None:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        pass

    with rlcore.meta_device():
        module = Policy.from_pretrained(qwen2_folder)
    with (
        rlcore.TrainEngine(module) as train,
        pytest.raises(UnsupportedError, match=r"python= for the executor 'fsdp2'.*code does not travel"),
    ):
        train.build(devices="cpu", python=other_python)


def test_another_launcher_is_refused(qwen2_folder: Path, other_python: str) -> None:
    engine = rlcore.InferenceEngine(qwen2_folder)
    with pytest.raises(UnsupportedError, match=r"launcher 'inline' for .*processes of their own"):
        engine.build(devices="cpu", launcher="inline", python=other_python)
