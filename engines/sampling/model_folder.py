"""A Hugging Face model folder: checked from its headers before any weight is read, and its tokenizer.

Nothing here uses the network or runs code from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlcore.errors import CheckpointError, MissingDependencyError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


class _HeaderEntry(msgspec.Struct):
    """The entry of a tensor in the header of a safetensors file."""

    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that ``check_model_folder`` found complete."""

    path: Path
    config: Mapping[str, Any]
    """config.json."""
    weight_files: tuple[Path, ...]

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        size = self._text_config.get("vocab_size")
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{self.path / 'config.json'} must have a vocab_size of at least 1, got {size!r}")
        return size

    @property
    def reads_images(self) -> bool:
        return isinstance(self.config.get("vision_config"), dict)

    @property
    def _text_config(self) -> Mapping[str, Any]:
        found = self.config.get("text_config", self.config)
        if not isinstance(found, dict):
            raise CheckpointError(f"text_config in {self.path / 'config.json'} must be a JSON object, got {found!r}")
        return found

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens of generation_config.json, else of config.json; () if it has none."""
        generation = self.path / "generation_config.json"
        sources: list[Mapping[str, Any]] = [_read_json(generation)] if generation.exists() else []
        sources += [self.config, self._text_config]
        eos: Any = next((source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None), [])
        ids = eos if isinstance(eos, list) else [eos]
        if any(type(one) is not int for one in ids):
            raise CheckpointError(f"eos_token_id in {self.path} must be a token id, or a list of some, got {eos!r}")
        return tuple(ids)


def check_model_folder(path: str | Path) -> ModelFolder:
    """Check that a folder has a config and whole safetensors files, reading only their headers.

    Raises:
        CheckpointError: names the file, what is wrong with it, and what to do.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"model path {str(path)!r} is not a folder; rlcore does not download models: "
            f"run `hf download <model> --local-dir <folder>` and give that folder"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    files = _check_weights(folder)
    found = ModelFolder(folder, _read_json(folder / "config.json"), tuple(files))
    largest = max((max(shape, default=0) for tensors in files.values() for shape in tensors.values()), default=0)
    if found.vocab_size > largest:  # before an embedding of that size is made
        raise CheckpointError(
            f"{folder / 'config.json'} has a vocab_size of {found.vocab_size}, and no weight there has a "
            f"dimension of that size (the largest is {largest}); download config.json again"
        )
    return found


def load_tokenizer(folder: ModelFolder) -> Any | None:
    """Return the folder's tokenizer, or None if it has none: prompts are then token ids, and text is "".

    Raises:
        CheckpointError: the tokenizer cannot be read, or knows more tokens than the model.
        MissingDependencyError: transformers is absent.
    """
    if not any((folder.path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="reading a tokenizer", extra="hf") from error
    # AutoTokenizer of transformers 5 replaces the splitting and decoding rules of tokenizer.json by those of
    # the model type, and may add tokens; PreTrainedTokenizerFast takes the file as it is.
    has_file = (folder.path / "tokenizer.json").is_file()
    reader: Any = PreTrainedTokenizerFast if has_file else AutoTokenizer
    try:
        tokenizer: Any = reader.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types; the original is the cause
        raise CheckpointError(f"the tokenizer in {folder.path} cannot be loaded: {error}") from error
    if len(tokenizer) > folder.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder.path} has {len(tokenizer)} tokens but the model's vocab_size is "
            f"{folder.vocab_size}; use the tokenizer it was trained with, or enlarge its embedding"
        )
    return tokenizer


def _check_weights(folder: Path) -> dict[Path, dict[str, list[int]]]:
    """Return the shape of every tensor in every file."""
    if (folder / _INDEX).is_file():
        return _check_shards(folder)
    if not (folder / _SINGLE).is_file():
        raise CheckpointError(
            f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}; other formats are not read: "
            f"load them once with transformers and call save_pretrained"
        )
    return {folder / _SINGLE: _shapes(folder / _SINGLE)}


def _check_shards(folder: Path) -> dict[Path, dict[str, list[int]]]:
    shard_of: Any = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(
            f"weight_map in {folder / _INDEX} must be an object with the file of each tensor, got {shard_of!r:.100}; "
            "download it again"
        )
    if foreign := [name for name in shard_of.values() if not isinstance(name, str) or Path(name).name != name]:
        raise CheckpointError(f"{folder / _INDEX} names {foreign[0]!r:.100}, which is not a file of this folder")
    shards = sorted(set(shard_of.values()))
    if absent := [name for name in shards if not _is_file(folder / name)]:
        raise CheckpointError(
            f"{folder / _INDEX} names {len(shards)} files, of which {len(absent)} are missing: "
            f"{', '.join(absent):.1000}; download them"
        )
    found = {folder / shard: _shapes(folder / shard) for shard in shards}
    for shard in shards:
        expected = {tensor for tensor, file in shard_of.items() if file == shard}
        if lacking := sorted(expected - found[folder / shard].keys()):
            raise CheckpointError(
                f"{folder / shard} lacks {len(lacking)} tensors that {_INDEX} puts there, "
                f"such as {lacking[0]!r}; it belongs to another checkpoint, download it again"
            )
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as of a name that is longer than a file's may be
        return False


def _shapes(file: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors of a safetensors file, whose size must be that of its header.

    The file has 8 bytes with the length of the header, the header in JSON, and the data.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is truncated or not safetensors ({size} bytes); download it again")
        entries = _entries(file, stream.read(header_bytes))
    data_bytes = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    expected = 8 + header_bytes + data_bytes
    if size != expected:
        raise CheckpointError(f"{file} is damaged: its header needs {expected} bytes, it has {size}; download it again")
    return {name: entry.shape for name, entry in entries.items()}


def _entries(file: Path, header: bytes) -> dict[str, _HeaderEntry]:
    name = ""
    try:
        found = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        entries = {}
        for name, entry in found.items():
            entries[name] = msgspec.json.decode(entry, type=_HeaderEntry)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        of = f" for {name!r:.100}" if name else ""
        raise CheckpointError(f"{file} has a damaged header{of}: {error}; download it again") from error
    return entries


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}; give a folder whose files may be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
