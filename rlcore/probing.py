"""Trying a package's or a vendor's code on a device, against plain torch, before it is taken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def why_not(probe: Callable[..., str | None], *arguments: Any, device: torch.device) -> str | None:
    """What ``probe(*arguments, device)`` says against the code that it tries, or how it failed; None if nothing.

    The first question comes from within a model's forward. A thread of its own has none of the caller's autocast, hooks
    on saved tensors (activation checkpointing counts those) and dispatch modes.
    """

    def run() -> str | None:
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)  # a new thread is on the first one
        return probe(*arguments, device)

    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()
    except Exception as error:  # of a package's, a vendor's or a compiler's own making
        return f"its probe failed: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Of its message, and not more than 200 characters."""
    return (str(error).splitlines() or [""])[0][:200]
