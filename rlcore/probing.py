"""Probes of a package's or a vendor's code on a device, compared with plain torch before the code is used."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def why_not(probe: Callable[..., str | None], *arguments: Any, device: torch.device) -> str | None:
    """Return the objection of ``probe(*arguments, device)`` to the code that it tries, or its error; None if it passes.

    The first probe may run inside a model's forward. It runs in a new thread, which has none of the caller's autocast,
    hooks on saved tensors (activation checkpointing counts saved tensors) and dispatch modes.
    """

    def run() -> str | None:
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)  # a new thread starts on the first device
        return probe(*arguments, device)

    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()
    except Exception as error:  # any error of a package, a vendor or a compiler
        return f"its probe failed: {type(error).__name__}: {short_line(error)}"


def short_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters of it."""
    return (str(error).splitlines() or [""])[0][:200]
