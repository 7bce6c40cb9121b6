"""What triton-ascend lowers although an NPU cannot run it, or not well: rules over the text of a lowered kernel.

``ttir`` is Triton's own IR, ``lowered`` the linalg IR that triton-adapter-opt makes of it. Both are needed: Triton's
names what was asked for (a sort, an atomic operation), the other shows what became of loads and how much lives at once.
"""

from __future__ import annotations

import re

from rlcore.types import ProgramLimits
from tests.devices.ascend.live_bytes import live_bytes

_ASKED_FOR = {
    "inline assembly": r"tt\.elementwise_inline_asm",
    "a function of another device's library": r"tt\.extern_elementwise",
    "float64": r"f64[>,) ]",
    "a sort": r"tt\.sort",
    "an atomic operation on int64": r"tt\.atomic_.*ptr<i64",
    "a tensor descriptor": r"tt\.(make_tensor_descriptor|descriptor_)",
}
_ELEMENT_BY_ELEMENT = "ExtractedLoadOrStore"
"""triton-adapter-opt's mark on a loop that it made of an access whose addresses are no tile."""


def findings(ttir: str, lowered: str, limits: ProgramLimits) -> list[str]:
    """What is wrong with the kernel, each in a few words; nothing if an NPU can be expected to run it."""
    found = [name for name, pattern in _ASKED_FOR.items() if re.search(pattern, ttir)]
    if _ELEMENT_BY_ELEMENT in lowered:
        found.append("an access to memory element by element")
    found += [f"an access of {shape} that its mask does not bound" for shape in sorted(_unmasked(lowered))]
    if (nbytes := live_bytes(lowered)) > limits.tile_bytes:
        found.append(f"{nbytes} bytes of tensors at once, of {limits.tile_bytes}")
    return found


def grid_finding(num_programs: int, limits: ProgramLimits) -> str:
    """What is wrong with a launch, or ""."""
    most = limits.num_programs
    return f"a grid of {num_programs} programs, of {most}" if num_programs > most else ""


def _unmasked(lowered: str) -> set[str]:
    """Shapes of accesses whose mask is no length: all is read, or written back, past the end of memory too."""
    whole: set[str] = set()
    tensors: dict[str, str] = {}
    shapes = set()
    for line in lowered.splitlines():
        if copy := re.search(r"memref\.copy (%\w+), (%\w+)", line):
            (whole.discard if copy[1].startswith("%subview") else whole.add)(copy[2])
        elif loaded := re.search(r"(%\w+) = bufferization\.to_tensor (%\w+) .*memref<(.*)>", line):
            tensors.pop(loaded[1], None)
            if loaded[2] in whole:
                tensors[loaded[1]] = loaded[3]
        elif select := re.search(r"arith\.select %\w+, (%\w+), (%\w+) :", line):
            shapes |= {tensors[name] for name in select.groups() if name in tensors}
    return shapes
