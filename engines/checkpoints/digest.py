"""Digests that find damage: of tensors, and of the text that describes them, which holds its own digest.

They find accidents. They do not stop a person, who can write new digests.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, get_args

from rlcore.errors import MissingDependencyError

Algorithm = Literal["xxh3_128", "sha256"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def new_digest(algorithm: str) -> Any:
    """Return an empty hash object, as those of ``hashlib``; it lets other threads run while it hashes."""
    if algorithm == "sha256":
        return hashlib.sha256()
    try:
        import xxhash
    except ImportError as error:
        raise MissingDependencyError("xxhash", needed_for="digests in checkpoints", extra="hf") from error
    return xxhash.xxh3_128()


def digest_of(data: bytes, algorithm: str) -> str:
    digest = new_digest(algorithm)
    digest.update(data)
    return str(digest.hexdigest())


def blank(algorithm: str) -> str:
    """Return the text of the same length that stands for a digest which is not known yet."""
    return "0" * len(new_digest(algorithm).hexdigest())


def sealed(text: bytes, algorithm: str) -> bytes:
    """Return the text with its own digest in the place of its first ``blank`` in quotes."""
    return _replaced(text, blank(algorithm), digest_of(text, algorithm))


def is_sealed(text: bytes, seal: str, algorithm: str) -> bool:
    """Return True if ``sealed`` gave this text and put ``seal`` into it."""
    return digest_of(_replaced(text, seal, blank(algorithm)), algorithm) == seal


def _replaced(text: bytes, old: str, new: str) -> bytes:
    return text.replace(f'"{old}"'.encode(), f'"{new}"'.encode(), 1)
