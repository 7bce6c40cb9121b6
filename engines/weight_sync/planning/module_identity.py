"""The identity of a module: a digest of its code and of its plain attributes, whatever its weights are.

Two modules with one digest run the same code with the same settings, as far as a loader and what it does after loading
can see: classes and their source files, numbers, names, flags and enumerations on every part, also inside the small
objects that hold a part's settings, and the values of buffers of whole numbers, such as maps of experts.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

_PLAIN = (str, int, float, bool, type(None), torch.dtype, enum.Enum)
_SETTINGS = ("quant_method", "scheme", "quant_config", "moe_config", "moe_parallel_config", "moe_runner_config")
"""Attributes whose objects hold settings of a part: which kernel it runs decides how its weights lie."""
_MOST_BUFFER_BYTES = 1 << 16


def module_identity(module: nn.Module) -> str:
    """Return the digest of a module's code and plain attributes, in hexadecimal digits."""
    digest = hashlib.sha256()
    classes: set[type] = set()
    for name, part in module.named_modules():
        for line in _lines(name, part, classes):
            digest.update(line.encode())
    for file in sorted(set(filter(None, map(_source_file, classes)))):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _lines(name: str, part: nn.Module, classes: set[type]) -> Iterator[str]:
    yield from _described(name, part, classes)
    for attribute in _SETTINGS:
        if (settings := getattr(part, attribute, None)) is not None:
            yield from _described(f"{name}.{attribute}", settings, classes)
    for buffer_name, buffer in part.named_buffers(recurse=False):
        if not buffer.is_floating_point() and buffer.nbytes <= _MOST_BUFFER_BYTES:
            yield f"{name}.{buffer_name}={buffer.tolist()}\n"


def _described(name: str, thing: object, classes: set[type]) -> Iterator[str]:
    classes.add(type(thing))
    yield f"{name}: {type(thing).__module__}.{type(thing).__qualname__}\n"
    for attribute, value in sorted(getattr(thing, "__dict__", {}).items()):
        if _is_plain(value):
            yield f"{name}.{attribute}={value!r}\n"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _source_file(cls: type) -> str | None:
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names:
        return None
    try:
        return inspect.getsourcefile(cls)
    except TypeError:  # of a compiled module, or made by a program without a file
        return None
