"""Every Triton kernel compiles for each target without a device; what it takes is printed, spills fail."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton has no build for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from rlcore.kernels import (  # noqa: E402
    triton_advantages,
    triton_returns,
    triton_rows,
    triton_strided_copy,
    triton_tiles,
)
from rlcore.kernels.copy_words import Kind  # noqa: E402

OPTIONS = ("num_warps", "num_stages")
TILES = triton_tiles._PRODUCT
HIDDEN = f"tensordesc<bf16[{TILES['BT']},{TILES['BH']}]>"
WEIGHT = f"tensordesc<bf16[{TILES['BV']},{TILES['BH']}]>"
STORED = f"[{TILES['BT']},{TILES['BV']}]>"
FLOATS, NONE = "*fp32", None


def copies(source: torch.dtype, destination: torch.dtype, lanes: int, num_dims: int) -> Any:
    options = triton_strided_copy.compile_options(Kind(source, destination, lanes, num_dims))
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    types = {"table": "*i64", "first_rows": "*i32", "num_tiles": "i32"}
    return triton_strided_copy._copy_kernel, types | given, {"num_warps": options["num_warps"]}


# Argument types in order, by name; None is an argument that is not given, numbers are compile-time constants.
KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
    "statistics of rows": (
        triton_rows._statistics_kernel,
        {"logits": "*bf16", "keep": NONE, "target": "*i64", "is_ignored": "*i1", "sharpness_T": NONE,
         "sharpness": "fp32", "softcap": NONE, "stride_v": 1, "stride_n": "i64", "stride_t": "i64",
         "WITH_ENTROPY": True},
        triton_rows._STATISTICS_TILE,
    ),
    "gradient of rows": (
        triton_rows._gradient_kernel,
        {"logits": "*bf16", "keep": NONE, "target": "*i64", "is_ignored": "*i1", "sharpness_T": NONE,
         "gradient": "*bf16", "sharpness": "fp32", "softcap": NONE, "stride_v": 1, "out_stride_v": 1, "stride_n": "i64",
         "stride_t": "i64", "out_stride_n": "i64", "out_stride_t": "i64"},
        triton_rows._GRADIENT_TILE,
    ),
    "statistics of capped rows": (
        triton_rows._statistics_kernel,
        {"logits": FLOATS, "keep": NONE, "target": "*i64", "is_ignored": "*i1", "sharpness": "fp32",
         "softcap": "fp32", "stride_v": 1, "stride_n": "i64", "stride_t": "i64", "WITH_ENTROPY": True},
        triton_rows._STATISTICS_TILE,
    ),
    "gradient of capped rows": (
        triton_rows._gradient_kernel,
        {"logits": FLOATS, "keep": NONE, "target": "*i64", "is_ignored": "*i1", "gradient": "*bf16",
         "sharpness": "fp32", "softcap": "fp32", "stride_v": 1, "out_stride_v": 1, "stride_n": "i64",
         "stride_t": "i64", "out_stride_n": "i64", "out_stride_t": "i64"},
        triton_rows._GRADIENT_TILE,
    ),
    "statistics of tiles": (
        triton_tiles._statistics_kernel,
        {"hidden": HIDDEN, "weight": WEIGHT, "bias": NONE, "exponentials": NONE, "IS_EDGE": False,
         "NUM_PROGRAMS": 132},
        TILES,
    ),
    "exponentials of tiles": (
        triton_tiles._statistics_kernel,
        {"hidden": HIDDEN, "weight": WEIGHT, "bias": NONE, "exponentials": f"tensordesc<fp16{STORED}",
         "IS_EDGE": False, "NUM_PROGRAMS": 132},
        TILES,
    ),
    "exponentials of tiles at the edge with bias": (
        triton_tiles._statistics_kernel,
        {"hidden": HIDDEN, "weight": WEIGHT, "exponentials": f"tensordesc<fp16{STORED}", "IS_EDGE": True,
         "NUM_PROGRAMS": 132},
        TILES,
    ),
    "gradient of tiles": (
        triton_tiles._dlogits_kernel,
        {"hidden": HIDDEN, "weight": WEIGHT, "bias": NONE, "dlogits": f"tensordesc<bf16{STORED}",
         "NUM_PROGRAMS": 132},
        TILES,
    ),
    "merge of tiles": (
        triton_tiles._merge_kernel,
        {"hidden": "*bf16", "weight": "*bf16", "bias": NONE, "target": "*i64", "is_ignored": "*i1"},
        triton_tiles._MERGE,
    ),
    "exponentials to gradient": (
        triton_tiles._exponentials_to_dlogits_kernel,
        {"exponentials": "*fp16", "dlogits": "*bf16"},
        triton_tiles._IN_PLACE,
    ),
    "scaled": (triton_tiles._scaled_kernel, {"out": "*bf16"}, {"BLOCK": triton_tiles._SCALED_BLOCK, "num_warps": 8}),
    "advantages of groups": (
        triton_advantages._advantage_kernel,
        {"lengths": NONE, "is_valid": "*i1", "epsilon": "fp32", "LEAVES_OUT": False,
         "NORMALISES": True},
        {"BP": 128, "BN": 16, "num_warps": 4},
    ),
    "blocks of a scan": (
        triton_returns._block_kernel,
        {"mask": "*i1", "edges": "*i64", "roles": "*i8", "is_valid_J": "*i1", "gamma": "fp32", "decay": "fp32"},
        triton_returns._TILE,
    ),
    "tokens of a scan": (
        triton_returns._token_kernel,
        {"roles": "*i8", "is_valid_J": "*i1", "is_valid": "*i1", "gamma": "fp32", "decay": "fp32"},
        triton_returns._TILE,
    ),
    "copies": copies(torch.int32, torch.int32, 4, 1),
    "copies of columns": copies(torch.int32, torch.int32, 4, 2),
    "copies of four dimensions": copies(torch.int16, torch.int16, 1, 4),
    "copies that cast": copies(torch.float32, torch.bfloat16, 8, 2),
    "gradient of targets": (
        triton_tiles._target_kernel,
        {"dlogits": "*bf16", "target": "*i64"},
        {"BT": triton_tiles._TARGET_ROWS},
    ),
}  # fmt: skip
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
    "E",
    "P",
    "N",
}
# The copy engine's tiles are for Hopper, and so far only there: see target.tiled_refusal.
TILED = {name for name, (kernel, _, _) in KERNELS.items() if "tensordesc" in str(KERNELS[name][1])}
CASES = [(name, arch) for name in KERNELS for arch in ((90, 100) if name in TILED else (80, 90, 100))]


def compiled(name: str, arch: int) -> Any:
    kernel, given, options = KERNELS[name]
    types = {argument: given.get(argument, "i32" if argument in INTEGERS else FLOATS) for argument in kernel.arg_names}
    assert given.keys() <= types.keys()
    types |= {argument: value for argument, value in options.items() if argument not in OPTIONS}
    constants = {argument: value for argument, value in types.items() if not isinstance(value, str)}
    signature = {argument: "constexpr" if argument in constants else kind for argument, kind in types.items()}
    # As a launch would find them: pointers and sizes are multiples of 16.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*") or kind in ("i32", "i64")
    }
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    taken = {option: options[option] for option in OPTIONS if option in options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=taken)


def resources(cubin: bytes, tmp_path: Path) -> dict[str, int]:
    """Registers and bytes of stack a thread, as the compiler's own tool reads them from the machine code."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing.stdout + listing.stderr)}


@pytest.mark.parametrize(("name", "arch"), CASES, ids=str)
def test_a_kernel_compiles_without_spills(name: str, arch: int, tmp_path: Path) -> None:
    kernel = compiled(name, arch)
    found = resources(kernel.asm["cubin"], tmp_path)
    print(f"{name}, sm_{arch}: {found['REG']} registers, {kernel.metadata.shared} bytes shared, {found['STACK']} stack")
    assert found["STACK"] == 0 and found["LOCAL"] == 0
    assert kernel.metadata.shared <= {80: 163, 90: 227, 100: 227}[arch] * 1024


@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        ("copies", "ld.global.v4.b32", "st.global.v4.b32"),
        ("copies of columns", "ld.global.v4.b32", "st.global.v4.b32"),
        ("copies that cast", "ld.global.v4.b32", "st.global.v4.b32"),
    ],
)
def test_copies_move_16_bytes_at_a_time(name: str, loads: str, stores: str) -> None:
    code = compiled(name, 90).asm["ptx"]
    wide = re.findall(r"(?:ld|st)\.global(?:\.\w+)*\.b\d+", code)
    assert loads in wide and stores in wide
    narrow = {found for found in wide if ".v" not in found}
    assert narrow <= {"ld.global.b64", "ld.global.b32"}  # the table's own columns, and the first row
