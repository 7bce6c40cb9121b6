"""Lowers every portable kernel as triton-ascend does for an NPU, and says what came of it.

python -m tests.devices.ascend.lowering REPORT.json     in an environment of triton_environment.py
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir  # type: ignore[attr-defined]  # triton-ascend's
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from rlcore.kernels.triton_programs import limits
from tests.devices.ascend.kernel_lint import findings
from tests.devices.ascend.live_bytes import live_bytes
from tests.devices.ascend.offers import ARCHITECTURE, DEVICE, implementations
from tests.kernels.triton_cases import OPTIONS, PORTABLE, Case, arguments

TARGET = GPUTarget(DEVICE, ARCHITECTURE, 0)


def report() -> dict[str, Any]:
    return {
        "compiler": f"triton-ascend {importlib.metadata.version('triton-ascend')}",
        "architecture": TARGET.arch,
        "tile_bytes": limits(DEVICE).tile_bytes,  # type: ignore[union-attr]
        "kernels": {name: entry(case) for name, case in PORTABLE.items()},
        "implementations": implementations(),
    }


def entry(case: Case) -> dict[str, Any]:
    tile = case.tile(DEVICE)
    found: dict[str, Any] = {
        "file": case.kernel.__module__.removeprefix("rlcore.kernels."),
        "tile": {name: value for name, value in tile.items() if isinstance(value, int) and name not in OPTIONS},
    }
    try:
        ttir, lowered = lower(case.kernel, arguments(case, tile))
    except (CompilationError, subprocess.CalledProcessError) as error:
        return found | {"message": message(error), "live_bytes": None, "findings": []}
    limited = limits(DEVICE)
    assert limited is not None
    return found | {"message": "", "live_bytes": live_bytes(lowered), "findings": findings(ttir, lowered, limited)}


def lower(kernel: Any, types: dict[str, Any]) -> tuple[str, str]:
    """Triton's IR and the linalg IR, of argument types and constants by name.

    Raises:
        CompilationError: it is no Triton of this version.
        CalledProcessError: triton-adapter-opt refuses it.
    """
    backend = AscendBackend(TARGET)
    options = backend.parse_options({})
    metadata = {name: getattr(options, name) for name in options.__dataclass_fields__} | {"target": backend.target}
    context = ir.context()
    ir.load_dialects(context)
    constants = {name: value for name, value in types.items() if not isinstance(value, str)}
    signature = {name: kind for name, kind in types.items() if name not in constants}
    source = ASTSource(fn=kernel, signature=signature, constants=constants)
    generation = backend.get_codegen_implementation(), backend.get_module_map()
    ttir = make_ttir(source.make_ir(options, *generation, context), metadata, options)
    return str(ttir), ttir_to_linalg(ttir, metadata, options, named_ops=True)


def message(error: Exception) -> str:
    """The innermost error, and the line of code that it is about."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode().splitlines()
        return next((line.partition("error: ")[2] for line in lines if "error: " in line), lines[-1] if lines else "")
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return str(error).strip().splitlines()[-1]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(report(), indent=1) + "\n")
