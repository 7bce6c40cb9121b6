"""The quickstart's model is a Hugging Face folder like any other, and its cache heals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.errors import CheckpointError
from rlcore.quickstart.model import CHARACTERS, quickstart_model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_model(seed=0, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def cached(written: Path, tmp_path: Path) -> Path:
    """A cache folder of its own that already holds the model of seed 0."""
    shutil.copytree(written, tmp_path / "quickstart" / written.name)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_transformers_loads_it_without_network(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model: Any = AutoModelForCausalLM.from_pretrained(written)
    tokenizer: Any = AutoTokenizer.from_pretrained(written)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 791_168
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.head_dim == 64
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == CHARACTERS.index("$")
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.08, rel=0.05)


@pytest.mark.parametrize("reader", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_the_tokenizer_has_one_token_a_character(written: Path, reader: str) -> None:
    import transformers

    tokenizer: Any = getattr(transformers, reader).from_pretrained(written)
    assert len(tokenizer) == len(CHARACTERS) == len(set(CHARACTERS)) == 21
    assert tokenizer("47+85=231$").input_ids == [CHARACTERS.index(c) for c in "47+85=231$"]
    ids = list(range(21))
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode(ids, skip_special_tokens=True) == "0123456789+-*/=() "
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == ("$", "_", "?")


def test_an_engine_reads_the_folder(written: Path) -> None:
    from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer

    tokenizer = load_tokenizer(check_model_folder(written))
    assert tokenizer is not None
    assert tokenizer("1+\t").input_ids == [CHARACTERS.index(c) for c in "1+?"]


def test_the_seed_decides_the_weights(written: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    same, other = quickstart_model(seed=0, cache=tmp_path), quickstart_model(seed=1, cache=tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert files(same) == files(written)
    assert files(other)["model.safetensors"] != files(written)["model.safetensors"]
    assert files(other)["tokenizer.json"] == files(written)["tokenizer.json"]


def test_a_whole_folder_is_used_as_it_is(cached: Path) -> None:
    folder = next((cached / "quickstart").iterdir())
    inode = folder.stat().st_ino
    assert quickstart_model(seed=0, cache=cached) == folder
    assert folder.stat().st_ino == inode


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _forget(folder: Path) -> None:
    (folder / "config.json").unlink()


def _garble(folder: Path) -> None:
    (folder / "checksums.json").write_text("{")


def _nest(folder: Path) -> None:
    (folder / "sub").mkdir()


def _become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize("damage", [_cut, _flip, _forget, _garble, _nest, _become_a_file])
def test_a_damaged_folder_is_written_anew(cached: Path, written: Path, damage: Callable[[Path], None]) -> None:
    folder = next((cached / "quickstart").iterdir())
    damage(folder)
    assert quickstart_model(seed=0, cache=cached) == folder
    assert files(folder) == files(written)
    assert [file.name for file in (cached / "quickstart").iterdir()] == [folder.name]  # no temporary left


def test_the_cache_is_that_of_the_settings(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(cached))
    assert quickstart_model(seed=0).parent == cached / "quickstart"


def test_the_checksums_name_every_file(written: Path) -> None:
    checksums = json.loads((written / "checksums.json").read_text())
    assert sorted([*checksums, "checksums.json"]) == sorted(files(written))


def test_a_full_disk_is_an_error_that_names_the_way_out(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    code = f"""
import resource
from pathlib import Path
from rlcore.quickstart.model import quickstart_model
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))  # the weights are 3.2 MB
quickstart_model(seed=0, cache=Path({str(tmp_path)!r}))
"""
    done = run_python(code)
    assert done.returncode == 1
    assert "CheckpointError: cannot write the quickstart's model to" in done.stderr
    assert "set RLCORE_CACHE to another folder" in done.stderr
    assert list((tmp_path / "quickstart").iterdir()) == []


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the quickstart's model.*set RLCORE_CACHE"):
        quickstart_model(seed=0, cache=tmp_path / "cache")
