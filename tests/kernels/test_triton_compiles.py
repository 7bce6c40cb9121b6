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

from rlcore.kernels.linear import triton_tile_gradients, triton_tiles  # noqa: E402
from rlcore.kernels.strided_copy import triton_quantized  # noqa: E402
from rlcore.registry import launch  # noqa: E402
from tests.kernels.triton_cases import (  # noqa: E402
    NONE,
    OPTIONS,
    PORTABLE,
    Case,
    arguments,
    fixed,
    launched,
    portable_files,
)

TILES = triton_tiles.product_tile("cpu")
HIDDEN = f"tensordesc<bf16[{TILES['BT']},{TILES['BH']}]>"
WEIGHT = f"tensordesc<bf16[{TILES['BV']},{TILES['BH']}]>"
STORED = f"[{TILES['BT']},{TILES['BV']}]>"
_PRODUCT = {"hidden": HIDDEN, "weight": WEIGHT, "NUM_PROGRAMS": 132}

TILED = {
    "statistics of tiles": Case(
        triton_tiles._statistics_kernel,
        _PRODUCT | {"bias": NONE, "exponentials": NONE, "IS_EDGE": False},
        fixed(**TILES),
    ),
    "exponentials of tiles": Case(
        triton_tiles._statistics_kernel,
        _PRODUCT | {"bias": NONE, "exponentials": f"tensordesc<fp16{STORED}", "IS_EDGE": False},
        fixed(**TILES),
    ),
    "exponentials of tiles at the edge with bias": Case(
        triton_tiles._statistics_kernel,
        _PRODUCT | {"exponentials": f"tensordesc<fp16{STORED}", "IS_EDGE": True},
        fixed(**TILES),
    ),
    "gradient of tiles": Case(
        triton_tile_gradients._dlogits_kernel,
        _PRODUCT | {"bias": NONE, "dlogits": f"tensordesc<bf16{STORED}"},
        fixed(**TILES),
    ),
}
"""The copy engine's tiles are for Hopper, and so far only there: see target.tiled_refusal."""

_SIZES = dict.fromkeys(["rows", "columns", "row_blocks", "groups"], "i32")
_QUANTIZED = _SIZES | {"table": "*i64", "largest": "*i32", "weight": "*u8"}

KERNELS = PORTABLE | TILED | {
    "merge of tiles": Case(
        triton_tiles._merge_kernel,
        {"hidden": "*bf16", "weight": "*bf16", "bias": NONE, "target": "*i64", "is_ignored": "*i1"},
        fixed(**triton_tiles._MERGE),
    ),
    "exponentials to gradient": Case(
        triton_tile_gradients._exponentials_to_dlogits_kernel,
        {"exponentials": "*fp16", "dlogits": "*bf16"},
        fixed(**triton_tile_gradients._IN_PLACE),
    ),
    "scaled": Case(
        triton_tile_gradients._scaled_kernel, {"out": "*bf16"},
        fixed(BLOCK=triton_tile_gradients._SCALED_BLOCK, num_warps=8),
    ),
    "terms of the gradient": Case(
        triton_tile_gradients._terms_kernel, {"is_ignored": "*i1"}, fixed(BT=triton_tile_gradients._TERM_ROWS)
    ),
    "gradient of targets": Case(
        triton_tile_gradients._target_kernel, {"dlogits": "*bf16", "target": "*i64"},
        fixed(BT=triton_tile_gradients._TARGET_ROWS),
    ),
}  # fmt: skip
FLOAT8 = {
    f"{kernel.__name__} in groups of {group}{', IEEE' * constants.get('IEEE', False)}": Case(
        kernel,
        {name: kind for name, kind in _QUANTIZED.items() if name in kernel.arg_names} | constants,
        fixed(**triton_quantized.compile_options(torch.bfloat16, torch.bfloat16, group, is_aligned=True)),
    )
    for group in (128, 16)
    for kernel, constants in (
        (triton_quantized._blocks_kernel, {"IEEE": False}),
        (triton_quantized._blocks_kernel, {"IEEE": True}),
        (triton_quantized._largest_kernel, {}),
        (triton_quantized._whole_kernel, {}),
    )
}
"""From architecture 89 on a device converts float8."""
KERNELS |= FLOAT8
QUICK_ARCH = 90
QUICK = {"statistics of rows", "statistics of tiles", "merge of tiles", "advantages of groups"}
"""A kernel of rows, of tiles, of what tiles leave, and of none of them; most take a second and more."""
QUICK_64 = "statistics of rows"
CASES = [
    pytest.param(name, arch, marks=() if arch == QUICK_ARCH and name in QUICK else pytest.mark.slow)
    for name in KERNELS
    for arch in ((90, 100) if name in TILED | FLOAT8 else (80, 90, 100, 120))
]


def compiled(name: str, target: GPUTarget) -> Any:
    case = KERNELS[name]
    tile = case.tile("cuda")
    types = arguments(case, tile)
    constants = {argument: value for argument, value in types.items() if not isinstance(value, str)}
    signature = {argument: "constexpr" if argument in constants else kind for argument, kind in types.items()}
    # As a launch would find them: pointers and sizes are multiples of 16.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*") or kind in ("i32", "i64")
    }
    names = case.kernel.arg_names
    source = ASTSource(case.kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    taken = {option: tile[option] for option in OPTIONS if option in tile}
    return triton.compile(source, target=target, options=taken)


def for_cuda(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, 32)


def test_every_kernel_is_compiled() -> None:
    named = {(kernel.__module__.removeprefix("rlcore.kernels."), kernel.__name__) for kernel, _, _ in KERNELS.values()}
    assert named == {(file, name) for file, names in launched().items() for name in names}
    portable = {kernel.__module__.removeprefix("rlcore.kernels.") for kernel, _, _ in PORTABLE.values()}
    assert portable == launched().keys() & portable_files()


def resources(cubin: bytes, tmp_path: Path) -> dict[str, int]:
    """Registers and bytes of stack a thread, as the compiler's own tool reads them from the machine code."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing.stdout + listing.stderr)}


@pytest.mark.parametrize(("name", "arch"), CASES, ids=str)
def test_a_kernel_compiles_without_spills(name: str, arch: int, tmp_path: Path) -> None:
    kernel = compiled(name, for_cuda(arch))
    found = resources(kernel.asm["cubin"], tmp_path)
    print(f"{name}, sm_{arch}: {found['REG']} registers, {kernel.metadata.shared} bytes shared, {found['STACK']} stack")
    assert found["STACK"] == 0 and found["LOCAL"] == 0
    assert kernel.metadata.shared <= {80: 163, 90: 227, 100: 227, 120: 99}[arch] * 1024


@pytest.mark.skipif("amd" not in triton.backends.backends, reason="this triton builds nothing for AMD")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK_64 else pytest.mark.slow) for name in PORTABLE]
)
def test_a_kernel_compiles_for_a_part_of_64_lanes_without_spills(name: str) -> None:
    """No such part has run one. ROCm devices, which are declared, have them in their ``warp_lanes``."""
    assert 64 in launch("rocm").spec.warp_lanes
    kernel = compiled(name, GPUTarget("hip", "gfx942", 64))
    found = dict(re.findall(r"\.(\w+): +(\d+)$", kernel.asm["amdgcn"], re.MULTILINE))
    print(f"{name}, gfx942: {found['vgpr_count']} registers, {kernel.metadata.shared} bytes shared")
    assert found["wavefront_size"] == "64"
    assert found["vgpr_spill_count"] == found["sgpr_spill_count"] == found["private_segment_fixed_size"] == "0"
    assert kernel.metadata.shared <= 64 * 1024
    assert kernel.metadata.num_warps * 64 <= 1024, "threads of a workgroup"


@pytest.mark.parametrize(("ending", "division"), [("", "div.full.f32"), (", IEEE", "div.rn.f32")])
def test_blocks_are_divided_as_vllms_function_runs(ending: str, division: str) -> None:
    """Inductor compiles it to Triton's ``/``, with 2 in the last place; eager torch divides as IEEE has it."""
    code = compiled(f"_blocks_kernel in groups of 128{ending}", for_cuda(90)).asm["ptx"]
    assert set(re.findall(r"div\.\w+\.f32", code)) == {division}


@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        pytest.param("copies", "ld.global.v4.b32", "st.global.v4.b32", marks=pytest.mark.slow),
        pytest.param("copies of columns", "ld.global.v4.b32", "st.global.v4.b32", marks=pytest.mark.slow),
        ("copies that cast", "ld.global.v4.b32", "st.global.v4.b32"),
    ],
)
def test_copies_move_16_bytes_at_a_time(name: str, loads: str, stores: str) -> None:
    code = compiled(name, for_cuda(90)).asm["ptx"]
    wide = re.findall(r"(?:ld|st)\.global(?:\.\w+)*\.b\d+", code)
    assert loads in wide and stores in wide
    narrow = {found for found in wide if ".v" not in found}
    assert narrow <= {"ld.global.b64", "ld.global.b32"}  # the table's own columns, and the first row
