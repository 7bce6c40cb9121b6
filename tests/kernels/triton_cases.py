"""The Triton kernels that are for any device, with the types of their arguments: what compilers are given to build."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlcore.kernels import plugin
from rlcore.kernels.returns import triton_group_advantage as triton_advantages
from rlcore.kernels.returns import triton_scan as triton_returns
from rlcore.kernels.strided_copy import triton_copy as triton_strided_copy
from rlcore.kernels.strided_copy.words import CopyKind
from rlcore.kernels.token import triton_rows

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
OPTIONS = ("num_warps", "num_stages")
FLOATS, NONE = "*fp32", None
INTEGERS = {
    "T",
    "V",
    "H",
    "J",
    "rows_per_entry",
    "stride",
    "hidden_stride",
    "weight_stride",
    "first_v",
    "num_v",
    "num_elements",
    "num_tiles",
    "E",
    "P",
    "N",
}


class Case(NamedTuple):
    kernel: Any
    given: Mapping[str, Any]
    """Types of arguments that are not what ``arguments`` takes for granted; None is one that is not given, numbers are
    compile-time constants."""
    tile: Callable[[str], Mapping[str, int]]
    """It maps a device type to constants and the compiler's options."""


def arguments(case: Case, tile: Mapping[str, int]) -> dict[str, Any]:
    """The type of each argument in order, or its value if the compiler is to know it."""
    given = {name: value for name, value in (case.given | tile).items() if name not in OPTIONS}
    assert given.keys() <= set(case.kernel.arg_names)
    return {
        argument: given.get(argument, "i32" if argument in INTEGERS else FLOATS) for argument in case.kernel.arg_names
    }


def fixed(**tile: int) -> Callable[[str], Mapping[str, int]]:
    return lambda device_type: tile


def copies(source: torch.dtype, destination: torch.dtype, lanes: int, num_dims: int) -> Case:
    tile = triton_strided_copy.compile_options(CopyKind(source, destination, lanes, num_dims))
    return Case(triton_strided_copy._copy_kernel, {"table": "*i64", "first_rows": "*i32"}, fixed(**tile))


_ROWS = {
    "logits": "*bf16", "keep": NONE, "target": "*i64", "ignore_index": "i32", "inverse_temperature_T": NONE,
    "inverse_temperature": "fp32", "softcap": NONE, "first": NONE, "stride_v": 1, "stride_n": "i64", "stride_t": "i64",
}  # fmt: skip
_OUT = {"gradient": "*bf16", "out_stride_v": 1, "out_stride_n": "i64", "out_stride_t": "i64"}
_CAPPED = {"logits": FLOATS, "softcap": "fp32", "inverse_temperature_T": FLOATS}
_ALL = {"keep": "*i1", "first": "i32", "stride_v": "i64"}
_CHECKED = {"is_valid": "*i1"}
_statistics = functools.partial(Case, triton_rows._statistics_kernel, tile=triton_rows.statistics_tile)
_gradient = functools.partial(Case, triton_rows._gradient_kernel, tile=triton_rows.gradient_tile)
_NUMBERS = {"gamma": "fp32", "decay": "fp32"}

PORTABLE: dict[str, Case] = {
    "statistics of rows": _statistics(_ROWS | _CHECKED | {"WITH_ENTROPY": True}),
    "gradient of rows": _gradient(_ROWS | _OUT),
    "statistics of capped rows": _statistics(_ROWS | _CAPPED | {"is_valid": NONE, "WITH_ENTROPY": True}),
    "gradient of capped rows": _gradient(_ROWS | _OUT | _CAPPED),
    "statistics of rows with all options": _statistics(_ROWS | _CAPPED | _ALL | _CHECKED | {"WITH_ENTROPY": True}),
    "gradient of rows with all options": _gradient(_ROWS | _OUT | _CAPPED | _ALL | {"out_stride_v": "i64"}),
    "advantages of groups": Case(
        triton_advantages._advantage_kernel,
        {"lengths": NONE, "is_valid": "*i1", "epsilon": "fp32", "LEAVES_OUT": False, "NORMALISES": True},
        fixed(BP=128, BN=16, num_warps=4),
    ),
    "blocks of a scan": Case(
        triton_returns._block_kernel,
        {"mask": "*i1", "edges": "*i64", "roles": "*i8", "is_valid_J": "*i1", **_NUMBERS},
        fixed(**triton_returns._TILE),
    ),
    "tokens of a scan": Case(
        triton_returns._token_kernel,
        {"roles": "*i8", "is_valid_J": "*i1", "is_valid": "*i1", **_NUMBERS},
        fixed(**triton_returns._TILE),
    ),
    "copies": copies(torch.int32, torch.int32, 4, 1),
    "copies of columns": copies(torch.int32, torch.int32, 4, 2),
    "copies of four dimensions": copies(torch.int16, torch.int16, 1, 4),
    "copies that cast": copies(torch.float32, torch.bfloat16, 8, 2),
}


# ------------------------------------------------------------------------------------------------ is that all?


def launched(folder: Path = KERNELS) -> dict[str, set[str]]:
    """Module within ``kernels/`` -> names of the kernels that it launches."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)}
        if names := {name for name in names if name.endswith("_kernel")}:
            found[".".join(path.relative_to(folder).with_suffix("").parts)] = names
    return found


def portable_files() -> set[str]:
    """Files that the registered implementations rest on, those apart that are for one architecture alone."""
    paths = [path for _, _, _, path, when in plugin._TRITON if when != "tiled_refusal"]
    return set().union(*(reached_files(path.partition(":")[0]) for path in paths))


def reached_files(entry: str, folder: Path = KERNELS) -> set[str]:
    """A file and all that it imports."""
    entries, reached = [entry], set()
    while entries:
        if (name := entries.pop()) not in reached:
            reached.add(name)
            entries += _imports(folder, name)
    return reached


def _imports(folder: Path, module: str) -> list[str]:
    nodes = ast.walk(ast.parse(_file(folder, module).read_text("utf-8")))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    ours = [module.removeprefix("rlcore.kernels.") for module in modules if module.startswith("rlcore.kernels.")]
    return [name for name in ours if _file(folder, name).exists()]


def _file(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")
