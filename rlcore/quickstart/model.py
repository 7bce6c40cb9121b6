"""The quickstart's own model: a small Qwen2 with random weights and a tokenizer of 21 characters.

It is a Hugging Face model folder like any other, written on first use into rlcore's cache folder and reused from
then on. A folder appears there whole, by rename, and holds the checksum of every file; one that is damaged, or was
left by another version of the format, is written anew.

The size of a head is 64, the smallest that vLLM's attention kernels take. ``initializer_range`` is 0.08 because the
usual 0.02 makes the warm-start stall.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlcore.errors import CheckpointError
from rlcore.quickstart.pretrained import load_transformers
from rlcore.settings import Settings

CHARACTERS = "0123456789+-*/=() ?_$"
"""One token each, by token id. "$" ends a sequence, "_" pads, "?" stands for any character not among them."""

_FORMAT = 1  # goes up when anything written below changes
_CHECKSUMS = "checksums.json"


def quickstart_model(*, seed: int, cache: Path | None = None) -> Path:
    """Return the folder of the small model, which is written if it is missing or damaged.

    Args:
        seed: of the random weights.
        cache: rlcore's cache folder; None is that of the settings (``RLCORE_CACHE``).

    Raises:
        CheckpointError: it cannot be written.
        MissingDependencyError: transformers is absent.
    """
    home = (Settings.from_env().cache if cache is None else cache) / "quickstart"
    folder = home / f"model-v{_FORMAT}-seed{seed}"
    if _is_whole(folder):
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=".writing-", ignore_cleanup_errors=True) as temporary:
            made = Path(temporary, "model")
            made.mkdir()
            _write(made, seed)
            _put_in_place(made, folder)
    except _write_errors() as error:
        raise CheckpointError(
            f"cannot write the quickstart's model to {folder}: {error}; "
            "free some space there, or set RLCORE_CACHE to another folder"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        checksums = json.loads((folder / _CHECKSUMS).read_bytes())
        return bool(checksums == _checksums(folder))
    except (OSError, ValueError):  # absent or damaged: it is written again in both cases
        return False


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.iterdir() if file.name != _CHECKSUMS)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename ``made`` to ``folder`` and replace what is there; if several processes try, all end with one model."""
    for file in made.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if _is_whole(folder):
        return
    with contextlib.suppress(FileNotFoundError):
        folder.rename(made.with_name("damaged"))
    try:
        made.rename(folder)
    except OSError:
        if not _is_whole(folder):
            raise


def _write(folder: Path, seed: int) -> None:
    transformers = load_transformers()
    eos, pad = CHARACTERS.index("$"), CHARACTERS.index("_")
    config = transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(CHARACTERS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    _write_weights(folder, transformers.Qwen2ForCausalLM, config, seed)
    config.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=eos, pad_token_id=pad).save_pretrained(folder)
    _write_tokenizer(folder)
    (folder / _CHECKSUMS).write_text(json.dumps(_checksums(folder), indent=1))


def _write_weights(folder: Path, model_class: Any, config: Any, seed: int) -> None:
    from safetensors.torch import save_file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}  # the tied head once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["?", "_", "$"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "?",
        "pad_token": "_",
        "eos_token": "$",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _write_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that safetensors and the tokenizer raise for a full disk."""
    try:
        from safetensors import SafetensorError
    except ImportError:
        return (OSError,)
    return (OSError, SafetensorError)
