"""Lowers every portable kernel as triton-ascend does for an NPU, and prints what came of it, as JSON.

python -m tests.devices.ascend.lowering     in an environment of triton_environment.py
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from triton._C.libtriton import ir  # type: ignore[attr-defined]  # triton-ascend's
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from rlcore.kernels.triton_programs import limits
from tests.devices.ascend.kernel_lint import findings
from tests.devices.ascend.offers import ARCHITECTURE, DEVICE
from tests.kernels.triton_cases import PORTABLE, Case, arguments

TARGET = GPUTarget(DEVICE, ARCHITECTURE, 0)


def entry(case: Case) -> dict[str, Any]:
    """The kernel's file, why it does not lower, or "", and what the lint says of it."""
    limited = limits(DEVICE)
    assert limited is not None
    found = {"file": case.kernel.__module__.removeprefix("rlcore.kernels.")}
    try:
        ttir, lowered = lower(case.kernel, arguments(case, case.tile(DEVICE)))
    except (CompilationError, subprocess.CalledProcessError) as error:
        return found | {"message": message(error), "findings": []}
    return found | {"message": "", "findings": findings(ttir, lowered, limited)}


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
    print(json.dumps({name: entry(case) for name, case in PORTABLE.items()}))
