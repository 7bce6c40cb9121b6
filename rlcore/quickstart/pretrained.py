"""The tokenizer and the model class of a model folder, the quickstart's own or the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer
from rlcore.errors import CheckpointError, MissingDependencyError, one_line


def tokenizer_of(path: Path) -> Any:
    """Return the folder's tokenizer.

    Raises:
        CheckpointError: the folder is missing or incomplete, or has no tokenizer.
    """
    tokenizer = load_tokenizer(check_model_folder(path))
    if tokenizer is None:
        raise CheckpointError(
            f"{path} has no tokenizer, which the quickstart needs to write its problems; "
            "put the model's tokenizer.json and tokenizer_config.json there"
        )
    return tokenizer


def model_class(path: Path) -> Any:
    """Return transformers' class of the folder's model.

    Raises:
        CheckpointError: it is not a causal language model, or not one that transformers knows.
    """
    transformers = load_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types
        raise CheckpointError(f"transformers cannot read {path / 'config.json'}: {one_line(error)}") from error
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise CheckpointError(
            f"{path} holds a {config.model_type!r} model, which is not a causal language model; use one that is"
        )
    return known[type(config)]


def load_transformers() -> Any:
    """Return the module transformers; raises MissingDependencyError with the pip command."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="rlcore quickstart", extra="quickstart") from error
    return transformers
