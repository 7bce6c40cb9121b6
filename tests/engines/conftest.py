"""Tiny random checkpoints, written as real Hugging Face model folders, and what tests do with them."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import rlcore
from rlcore.engines.launchers import logs
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.logs import LogMerger
from rlcore.engines.weight_sync.channels.connections import accept_controls, connect_control
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from tests.warm import LIMIT_S, warm_workers

_CHARACTERS = "0123456789+-*=$ .abcd"

SHARED_DEVICES = ("cpu:4", "cpu:5")
"""Nothing else in this folder has workers there."""
_SHARED: pytest.StashKey[WorkerGroup] = pytest.StashKey()


class Keeper:
    """A worker that does nothing: as long as it is there, its process takes up workers of the same device."""

    def __init__(self, context: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def _warm_workers() -> Iterator[None]:
    """Workers begin with torch imported; tests/base and tests/bench have some that begin with nothing."""
    with warm_workers():
        yield


@pytest.fixture(scope="module")
def shared_devices(request: pytest.FixtureRequest, short_runtime_folder: Path) -> tuple[str, ...]:
    """Devices whose processes all files of this folder share: to start one costs seconds. For engines that nobody
    kills, built with RLCORE_RUNTIME as ``short_runtime_folder``."""
    if _SHARED not in request.config.stash:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
            patch.setenv("OMP_NUM_THREADS", "1")
            request.config.stash[_SHARED] = start_workers(
                Keeper, "the tests of engines", list(SHARED_DEVICES), launcher="process", timeout_s=600
            )
    return SHARED_DEVICES


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Other folders want processes that start as they say."""
    is_last = nextitem is None or nextitem.path.parent != Path(__file__).parent
    if is_last and _SHARED in item.config.stash:
        item.config.stash[_SHARED].stop()
        del item.config.stash[_SHARED]


@pytest.fixture(scope="session")
def characters() -> str:
    """The tiny models' tokens, one a character, by token id; "$" ends a text."""
    return _CHARACTERS


@pytest.fixture(scope="session")
def tiny_config() -> dict[str, Any]:
    """Arguments of a transformers config: grouped-query attention, tied head, 21 tokens, 256 positions."""
    return {
        "vocab_size": len(_CHARACTERS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,  # peaked distributions, so that greedy choices have no near ties
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": _CHARACTERS.index("$"),
        "pad_token_id": None,
        "dtype": "float32",
    }


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., None]:
    """``write_tokenizer(folder, characters=...)``."""

    def write(folder: Path, characters: str = _CHARACTERS) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {character: token for token, character in enumerate(characters)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=characters[-1]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(["$"])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "$"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    return write


@pytest.fixture(scope="session")
def write_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[..., None]
) -> Callable[..., Path]:
    """``write_checkpoint(config, seed=0, **save_options)``: folder of a random model with tokenizer."""

    def write(config: Any, *, seed: int = 0, **save_options: Any) -> Path:
        from transformers import AutoModelForCausalLM

        folder = tmp_path_factory.mktemp(config.model_type)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, **save_options)
        write_tokenizer(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def qwen2_folder(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> Path:
    from transformers import Qwen2Config

    return write_checkpoint(Qwen2Config(**tiny_config))


@pytest.fixture(scope="session")
def llama_folder(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> Path:
    from transformers import LlamaConfig

    return write_checkpoint(LlamaConfig(**tiny_config))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """``copy_of(folder)``: a copy to damage."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    return copy


@pytest.fixture(scope="session")
def policy() -> Any:
    """Unless the file has another."""
    from .train_policy import train_policy

    return train_policy()


@pytest.fixture(scope="module")
def build(
    policy: Any, qwen2_folder: Path, shared_devices: tuple[str, ...], short_runtime_folder: Path
) -> Iterator[Callable[..., rlcore.TrainEngine]]:
    """``build(workers, device, folder)``: a train engine of ``policy`` that the tests of a file share."""
    from .train_policy import engines_of

    with engines_of(policy, qwen2_folder, shared_devices, short_runtime_folder) as get:
        yield get


@pytest.fixture
def truth(policy: Any, qwen2_folder: Path) -> Any:
    """The policy of the engines of ``build``, trained on the CPU in float32."""
    from .train_policy import truth_of

    return truth_of(policy, qwen2_folder)


@pytest.fixture
def engine(policy: Any, qwen2_folder: Path) -> Iterator[rlcore.TrainEngine]:
    """An engine of ``policy``, on the CPU."""
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as built:
        yield built.build(devices="cpu")


@pytest.fixture
def short_folder(short_runtime_folder: Path) -> Path:
    """A folder like ``tmp_path``, for sockets, whose paths have at most 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="", dir=short_runtime_folder))


@pytest.fixture
def ends(short_folder: Path) -> tuple[ControlSocket, ControlSocket]:
    """Two ends of a control channel."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_controls, short_folder / "s", 1)
        connected = connect_control(short_folder / "s")
        return accepted.result()[0], connected


@pytest.fixture
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_runtime_folder: Path) -> str:
    """ "inline", unless the test names others: ``@pytest.mark.parametrize("launcher", [...], indirect=True)``."""
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    return str(getattr(request, "param", "inline"))


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., None]:
    """``torchrun(program, *arguments)`` on two ranks of this machine; all of them must succeed."""

    def run(program: str, *arguments: object) -> None:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(program))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        done = subprocess.run(
            [*command, str(script), *map(str, arguments)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> io.StringIO:
    """Stands for the user's stderr, a file unless the test says otherwise.

    capfd does not: while it is read it loses what a thread writes, as the one that forwards what workers print.
    """
    out: io.StringIO = getattr(request, "param", io.StringIO)()
    monkeypatch.setattr(logs, "_merger", LogMerger(lambda: out))  # which has heard nothing yet
    return out
