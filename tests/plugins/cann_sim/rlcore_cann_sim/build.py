"""Builds the stand-in with gcc: the libraries that the torch_npu wheel loads, and the operators.

What the wheel needs (``nm -D``) and csrc does not define becomes a function that says its name and aborts.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "csrc"
LIBRARIES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "ascend_hal", "runtime", "mspti")
"""Names under which the wheel asks for what is all in libascendcl.so."""
_CANN = re.compile(r"(acl|Hccl|Msprof|rt[A-Z])\w+")


def build(torch_npu: Path, torch: Path, folder: Path) -> None:
    """Make the libraries in ``folder`` for the packages at these places."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [SOURCES / name for name in ("runtime.c", "memory.c", "hccl.c")]
    _compile(sources, folder / "libdefined.so")
    missing = sorted(_needed(torch_npu) - set(_symbols(folder / "libdefined.so", "--defined-only")))
    refused = folder / "refused.c"
    refused.write_text(_refusing(missing))
    (folder / "libdefined.so").unlink()
    _compile([*sources, refused], folder / "libascendcl.so", "-Wl,-soname,libascendcl.so")
    for name in LIBRARIES:
        empty = folder / "empty.c"
        empty.write_text("")
        links = ("-L", str(folder), "-Wl,--no-as-needed", "-lascendcl", f"-Wl,-soname,lib{name}.so")
        _compile([empty], folder / f"lib{name}.so", *links)
    _build_operators(torch, folder)


def _needed(torch_npu: Path) -> set[str]:
    libraries = [*torch_npu.glob("_C*.so"), *torch_npu.glob("lib/*.so")]
    return {symbol for library in libraries for symbol in _symbols(library, "--undefined-only")}


def _symbols(library: Path, which: str) -> Iterator[str]:
    listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name = line.split()[-1]
        if _CANN.fullmatch(name):
            yield name


def _refusing(symbols: list[str]) -> str:
    lines = ['#include <stdlib.h>\n#include "sim.h"\n']
    lines += [f'void {name}(void) {{ sim_log("refused", "{name}"); abort(); }}' for name in symbols]
    return "\n".join(lines)


def _compile(sources: list[Path], into: Path, *options: str) -> None:
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-fno-builtin", f"-I{SOURCES}"]
    _run("gcc", *flags, *map(str, sources), "-o", str(into), *options, "-lm", "-lpthread")


def _build_operators(torch: Path, folder: Path) -> None:
    headers = [f"-I{torch / part}" for part in ("include", "include/torch/csrc/api/include")]
    libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-L{folder}", "-lascendcl"]
    flags = ["-std=c++20", "-O0", "-g0", "-fPIC", "-shared"]
    _run("g++", *flags, *headers, str(SOURCES / "operators.cpp"), "-o", str(folder / "liboperators.so"), *libraries)


def _run(*command: str) -> None:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{found.stderr}")
