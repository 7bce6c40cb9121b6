from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer
from rlcore.errors import CheckpointError

Copy = Callable[[Path], Path]


@pytest.fixture(scope="module")
def sharded_folder(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> Path:
    from transformers import Qwen2Config

    folder = write_checkpoint(Qwen2Config(**tiny_config), max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_a_whole_folder_passes(qwen2_folder: Path, sharded_folder: Path, characters: str) -> None:
    folder = check_model_folder(qwen2_folder)
    assert folder.vocab_size == len(characters)
    assert folder.stop_token_ids == (characters.index("$"),)
    assert folder.weight_files == (qwen2_folder / "model.safetensors",)
    assert check_model_folder(str(sharded_folder)).weight_files == tuple(sorted(sharded_folder.glob("*.safetensors")))


def test_stop_tokens_are_those_of_generation_config_else_of_config(
    qwen2_folder: Path, copy_of: Copy, characters: str
) -> None:
    folder = copy_of(qwen2_folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert check_model_folder(folder).stop_token_ids == (3, 5)
    (folder / "generation_config.json").unlink()
    assert check_model_folder(folder).stop_token_ids == (characters.index("$"),)


def test_a_missing_path_says_that_nothing_is_downloaded() -> None:
    with pytest.raises(CheckpointError, match=r"'Qwen/Qwen2-0.5B' is not a folder; .* `hf download <model>"):
        check_model_folder("Qwen/Qwen2-0.5B")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        check_model_folder(tmp_path)


def test_a_broken_config_is_refused(qwen2_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(qwen2_folder)
    (folder / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        check_model_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json must hold a JSON object, got list"):
        check_model_folder(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json must have a vocab_size of at least 1, got None"):
        check_model_folder(folder)


def test_a_config_of_wrong_kinds_is_refused(qwen2_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(qwen2_folder)
    config = json.loads((folder / "config.json").read_bytes())
    wrong = {
        r"vocab_size of at least 1, got True": {"vocab_size": True},
        r"text_config in .*config\.json must be a JSON object, got \[\]": {"text_config": []},
        r"a vocab_size of 10000, and no weight there has a dimension of that size \(the largest is \d+\); download": {
            "vocab_size": 10_000
        },
    }
    for message, changes in wrong.items():
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            check_model_folder(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"eos_token_id in .* must be a token id, or a list of some, got '</s>'"):
        _ = check_model_folder(folder).stop_token_ids


def test_a_folder_without_weights_is_refused(qwen2_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(qwen2_folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors nor .*save_pretrained"):
        check_model_folder(folder)


@pytest.mark.parametrize("kept_bytes", [0, 5, 200])
def test_weights_truncated_within_the_header_are_refused(qwen2_folder: Path, copy_of: Copy, kept_bytes: int) -> None:
    weights = copy_of(qwen2_folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=rf"is truncated or not safetensors \({kept_bytes} bytes\)"):
        check_model_folder(weights.parent)


def test_weights_truncated_within_the_data_are_refused(qwen2_folder: Path, copy_of: Copy) -> None:
    weights = copy_of(qwen2_folder) / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"is damaged: its header needs {size} bytes, it has {size - 1}"):
        check_model_folder(weights.parent)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"not json", ": JSON is malformed"),
        (b"[1, 2]  ", ": Expected `object`, got `array`"),
        (b'{"a": 1}', " for 'a': Expected `object`, got `int`"),
        (b"\xff\xfe{}    ", ": "),
        (b'{"a": {"shape": [2], "data_offsets": ["0", "8"]}}', " for 'a': Expected `int`, got `str` - at `$.data_off"),
        (b'{"a": {"shape": [2], "data_offsets": "08"}}', " for 'a': Expected `array`, got `str` - at `$.data_offsets`"),
        (b'{"a": {"shape": [2], "data_offsets": [0, 8.5]}}', " for 'a': Expected `int`, got `float`"),
        (b'{"a": {"shape": "2", "data_offsets": [0, 8]}}', " for 'a': Expected `array`, got `str` - at `$.shape`"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    ],
    ids=range(9),
)
def test_a_damaged_header_is_refused(qwen2_folder: Path, copy_of: Copy, header: bytes, told: str) -> None:
    weights = copy_of(qwen2_folder) / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors has a damaged header{re.escape(told)}"):
        check_model_folder(weights.parent)


def test_absent_shards_are_named(sharded_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(sharded_folder)
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"names {len(shards)} files, of which 1 are missing: {shards[1].name}"):
        check_model_folder(folder)


def test_a_shard_of_another_checkpoint_is_refused(sharded_folder: Path, qwen2_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(sharded_folder)
    shards = sorted(folder.glob("*.safetensors"))
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(CheckpointError, match=rf"{shards[0].name} lacks \d+ tensors"):
        check_model_folder(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd"])
def test_an_index_cannot_point_out_of_the_folder(sharded_folder: Path, copy_of: Copy, name: str) -> None:
    index = copy_of(sharded_folder) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=rf"names '{name}', which is not a file of this folder"):
        check_model_folder(index.parent)


@pytest.mark.parametrize("name", [["a"], 3, None, {}])
def test_an_index_names_files_by_text(sharded_folder: Path, copy_of: Copy, name: Any) -> None:
    index = copy_of(sharded_folder) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    with pytest.raises(CheckpointError, match=re.escape(f"names {name!r}, which is not a file of this folder")):
        check_model_folder(index.parent)


@pytest.mark.parametrize("name", ["x" * 300, "\ud800", "a\0b", ".."])
def test_an_index_of_files_that_cannot_be_there_says_that_they_are_missing(
    sharded_folder: Path, copy_of: Copy, name: str
) -> None:
    index = copy_of(sharded_folder) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="names 1 files, of which 1 are missing: "):
        check_model_folder(index.parent)


@pytest.mark.parametrize("weight_map", ["[3]", "3", "{}", "null", "[" * 100_000])
def test_an_index_without_a_weight_map_is_refused(sharded_folder: Path, copy_of: Copy, weight_map: str) -> None:
    index = copy_of(sharded_folder) / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {weight_map}}}')
    deep = "index.json is not valid JSON: "
    shown = weight_map.replace("null", "None")
    told = (
        deep if len(weight_map) > 9 else f"index.json must be an object with the file of each tensor, got {shown}; dow"
    )
    with pytest.raises(CheckpointError, match=re.escape(told)):
        check_model_folder(index.parent)


def test_the_tokenizer_is_the_files_own(qwen2_folder: Path, characters: str) -> None:
    tokenizer = load_tokenizer(check_model_folder(qwen2_folder))
    assert tokenizer is not None
    text = "47+85= a.b$"
    token_ids = tokenizer(text).input_ids
    assert token_ids == [characters.index(c) for c in text]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "47+85= a.b"


def test_a_folder_may_have_no_tokenizer(qwen2_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(qwen2_folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_tokenizer(check_model_folder(folder)) is None


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    qwen2_folder: Path, copy_of: Copy, write_tokenizer: Callable[..., None], characters: str
) -> None:
    folder = copy_of(qwen2_folder)
    write_tokenizer(folder, characters + "xyz")
    with pytest.raises(CheckpointError, match="has 24 tokens but the model's vocab_size is 21"):
        load_tokenizer(check_model_folder(folder))


def test_a_broken_tokenizer_is_refused(qwen2_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(qwen2_folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(check_model_folder(folder))


def test_loading_never_reaches_the_network(qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"connect{args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer(check_model_folder(qwen2_folder)) is not None


def test_no_code_of_a_folder_runs(qwen2_folder: Path, copy_of: Copy, tmp_path: Path) -> None:
    """A model that transformers knows is read by transformers' own code, and any other is refused."""
    folder, ran = copy_of(qwen2_folder), tmp_path / "ran"
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    classes = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "theirs.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    load_tokenizer(check_model_folder(folder))
    with rlcore.InferenceEngine(folder).build(devices="cpu") as engine:
        assert engine.generate([[1, 2]], {"max_tokens": 1})
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "theirs"}))
    with pytest.raises(CheckpointError), rlcore.InferenceEngine(folder).build(devices="cpu"):
        pass
    assert not ran.exists()
