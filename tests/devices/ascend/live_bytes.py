"""How many bytes of tensors a lowered kernel keeps at once: what its program's buffer must hold.

Read from the text of the linalg IR. Each result is counted from the line that makes it to the last that reads it, what
a loop reads from outside to the loop's end. A destination that an operation only fills is no storage of its own, a view
is its source's. Nothing is computed in place, so that the sum is rather too high than too low; what the compiler below
needs for itself (a reduction's workspace, say) is not in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ITEM_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8, "index": 8}
_SHAPED = re.compile(r"(?:tensor|memref)<((?:\d+x)*)(\w+)[,>]")
_RESULT = re.compile(r"\s*(%\w+)(?::\d+)? = ([\w.]+)")
_CARRIED = re.compile(r"(%\w+) = (%\w+)")
_VIEWS = (
    "bufferization.to_memref", "bufferization.to_tensor", "memref.cast", "memref.reinterpret_cast", "memref.subview",
    "tensor.collapse_shape", "tensor.expand_shape", "tensor.extract_slice", "tensor.reshape",
)  # fmt: skip


@dataclass(slots=True)
class _Value:
    """What lies in memory from one line to another."""

    nbytes: int
    first: int
    last: int


@dataclass(slots=True)
class _Region:
    start: int
    is_loop: bool
    names: dict[str, _Value]
    """Those that can be read in it, outer ones too."""
    kept: list[_Value] = field(default_factory=list)
    """Values from outside that it reads; a loop does so to its end."""


def live_bytes(lowered: str) -> int:
    """The most that live at one time, of the linalg IR of one kernel."""
    values: list[_Value] = []
    regions = [_Region(0, False, {})]
    lines = lowered.splitlines()
    for number, line in enumerate(lines):
        text = line.strip()
        closed = _close(regions, number) if text.startswith("}") else None
        _read(line, number, regions)
        made = _make(line, number, regions[-1].names)
        values += [made] if made else []
        if text.endswith("{"):
            is_loop = "scf.for" in text or "scf.while" in text or text == "} do {"
            start = closed.start if closed and text == "} do {" else number
            regions.append(_Region(start, is_loop, dict(regions[-1].names)))
            if is_loop and made:
                regions[-1].names |= {inner: made for inner, _ in _CARRIED.findall(text.partition("=")[2])}
    changes = [0] * (len(lines) + 1)
    for value in values:
        changes[value.first] += value.nbytes
        changes[value.last + 1] -= value.nbytes
    return max(_running(changes))


def _close(regions: list[_Region], number: int) -> _Region:
    region = regions.pop()
    for value in region.kept if region.is_loop else ():
        value.last = number
    return region


def _read(line: str, number: int, regions: list[_Region]) -> None:
    for name in re.findall(r"%\w+", line):
        if value := regions[-1].names.get(name):
            value.last = max(value.last, number)
            for region in regions:
                if region.is_loop and region.start >= value.first:
                    region.kept.append(value)


def _make(line: str, number: int, names: dict[str, _Value]) -> _Value | None:
    """The value that the line makes, if it is one of its own, known by its name from now on."""
    if not (found := _RESULT.match(line)):
        return None
    name, operation = found.groups()
    if operation in _VIEWS:
        source = re.search(r"%\w+", line[found.end() :])
        if source and source[0] in names:
            names[name] = names[source[0]]
        else:
            names.pop(name, None)
        return None
    value = _Value(_result_bytes(operation, line), number, number)
    names[name] = value
    return value


def _result_bytes(operation: str, line: str) -> int:
    if operation == "tensor.empty":
        return 0
    if operation in ("scf.for", "scf.while", "scf.if", "call"):
        return sum(map(_bytes, _SHAPED.findall(line.rpartition("->")[2])))
    shaped = _SHAPED.findall(line.rpartition("outs(")[2])
    if not shaped:
        return 0
    dims, item = shaped[-1]
    return _bytes((dims, "i1" if operation.startswith("arith.cmp") else item))


def _bytes(shaped: tuple[str, str]) -> int:
    dims, item = shaped
    total = _ITEM_BYTES.get(item, 0)
    for dim in dims.split("x")[:-1]:
        total *= int(dim)
    return total


def _running(changes: list[int]) -> list[int]:
    total, sums = 0, []
    for change in changes:
        total += change
        sums.append(total)
    return sums
