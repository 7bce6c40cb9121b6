"""Dry runs of decoders, kept while a plan makes copies of a model. It needs no transformers, as some plans do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_kept: ContextVar[dict[tuple[type, str, str], Any] | None] = ContextVar("rlcore_packed_dry_runs", default=None)


@contextlib.contextmanager
def shared_dry_runs() -> Iterator[None]:
    """Inside, decoders of one configuration share a dry run, as the copies of a plan may.

    Not for longer: what a class of transformers does may be replaced at any time.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def kept_dry_runs() -> dict[tuple[type, str, str], Any] | None:
    """Return them by class of the decoder, name of its attention, and configuration; None outside of the context."""
    return _kept.get()
