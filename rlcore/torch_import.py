"""``import torch`` with its first error kept: a second attempt in the same process fails with another message."""

from __future__ import annotations

import functools
import importlib
import sys

from rlcore.errors import TorchImportError


def import_torch() -> None:
    """Import torch, before anything that needs it.

    Raises:
        TorchImportError: torch, or a back end that it loads, cannot be imported; every call raises the same error.
    """
    if (cause := _failure()) is not None:
        raise TorchImportError(cause) from cause


@functools.cache
def _failure() -> Exception | None:
    """Import torch once: it registers its operators before it loads back ends, and cannot register them again."""
    if "torch._C" in sys.modules and "torch" not in sys.modules:
        return ImportError("it failed before in this process, where its first error has the cause")
    try:
        importlib.import_module("torch")
    except Exception as error:
        return error
    return None
