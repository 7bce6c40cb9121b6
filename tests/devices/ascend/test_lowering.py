"""Which Triton kernels triton-ascend lowers for an NPU, what the lint says of them, and which of them are offered.

The report that docs/ascend.md shows is lowering.json. Under the marker ``npu_sim`` it is made again, by the compiler.
TRITON_ASCEND_ENVIRONMENT names a folder to keep the compiler's environment in.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.conformance.table import into
from rlcore.kernels import triton_programs as programs
from rlcore.kernels.softmax_rows import RowStatistics, ScaledRows
from rlcore.registry import registry
from rlcore.types import ProgramLimits
from tests.devices.ascend.kernel_lint import findings, grid_finding
from tests.devices.ascend.lowering_table import MARK, PAGE, REPORT, table
from tests.devices.ascend.triton_environment import make
from tests.warm import LIMIT_S

pytest.importorskip("triton", reason="triton has no build for this platform")

from rlcore.kernels.token import triton_rows
from tests.devices.ascend.offers import implementations
from tests.kernels.triton_cases import PORTABLE

ROOT = Path(__file__).resolve().parents[3]
KEPT = json.loads(REPORT.read_text())
REMAKE = """the report is not of these kernels; make it again, and the table:
python tests/devices/ascend/triton_environment.py FOLDER
FOLDER/bin/python -m tests.devices.ascend.lowering tests/devices/ascend/lowering.json
python -m tests.devices.ascend.lowering_table"""
LIMITS = ProgramLimits(tile_bytes=100, num_programs=10)


# ------------------------------------------------------------------------------------------------ the kept report


def test_the_report_is_of_the_portable_kernels_with_the_tiles_that_they_have() -> None:
    """Cases that are new since are found below, by the compiler."""
    files = {case.kernel.__module__.removeprefix("rlcore.kernels.") for case in PORTABLE.values()}
    assert {entry["file"] for entry in KEPT["kernels"].values()} == files
    for name, entry in KEPT["kernels"].items():
        assert entry["tile"].items() <= PORTABLE[name].tile("npu").items(), REMAKE
    assert KEPT["tile_bytes"] == programs.limits("npu").tile_bytes  # type: ignore[union-attr]


def test_every_kernel_that_is_offered_lowers_and_passes_the_lint() -> None:
    faulty = {entry["file"] for entry in KEPT["kernels"].values() if entry["message"] or entry["findings"]}
    offered = {file for user in KEPT["implementations"] if user["refusal"] is None for file in user["files"]}
    assert offered == {"token.triton_rows"}
    assert not offered & faulty


def test_what_is_offered_today_is_what_the_report_says() -> None:
    """So that limits of the device which change, such as float64 in programs, change it: found without the compiler."""
    assert implementations() == KEPT["implementations"], REMAKE


def test_the_page_has_the_table_of_the_report() -> None:
    page = PAGE.read_text()
    assert into(page, table(KEPT), MARK) == page


def test_a_row_says_why_a_kernel_does_not_lower_and_a_note_why_it_is_not_offered() -> None:
    entry = {"file": "f", "tile": {"BLOCK": 8}, "message": "no such type", "live_bytes": None, "findings": []}
    lint = entry | {"message": "", "live_bytes": 2048, "findings": ["a sort", "float64"], "tile": {}}
    users = [{"op": "sum", "name": "triton", "files": ["f"], "refusal": "it is slow"}]
    report = {"compiler": "c", "architecture": "a", "tile_bytes": 4096, "kernels": {"one": entry, "two": lint}}
    lines = table(report | {"implementations": users}).splitlines()
    assert lines[2:4] == [
        "| one | no: `no such type` | BLOCK 8 |  |  | no (1) |",
        "| two | yes |  | 2,048 | a sort; float64 | no (1) |",
    ]
    assert lines[5] == "1. it is slow"
    assert "| `sum` |" in table(report | {"implementations": [users[0] | {"refusal": None}]})


# ------------------------------------------------------------------------------------------------ the lint

LOOP = """
%0 = tensor.empty() : tensor<4xf32>
%1 = linalg.fill ins(%cst : f32) outs(%0 : tensor<4xf32>) -> tensor<4xf32>
%2:2 = scf.for %arg1 = %c0 to %c9 step %c1 iter_args(%arg2 = %1, %arg3 = %c0) -> (tensor<4xf32>, i32) {
  %alloc = memref.alloc() : memref<4xf32>
  %3 = bufferization.to_tensor %alloc restrict writable : memref<4xf32>
  %4 = arith.cmpf oeq, %3, %arg2 : tensor<4xf32>
  %5 = arith.select %4, %3, %arg2 : tensor<4xi1>, tensor<4xf32>
  %6 = arith.extf %5 : tensor<4xf32> to tensor<4xf64>
  scf.yield %5, %arg3 : tensor<4xf32>, i32
}
%7 = arith.addf %2#0, %1 : tensor<4xf32>
"""
"""At the select live: the fill (read behind the loop), what the loop carries, a load, a mask and the result."""


def test_bytes_are_counted_where_most_tensors_live() -> None:
    held = 16 + 16 + 16 + 4 + 16
    wider = 16 + 16 + 16 + 32  # the load and the mask are no longer read
    assert findings("", LOOP, dataclasses.replace(LIMITS, tile_bytes=max(held, wider))) == []
    small = dataclasses.replace(LIMITS, tile_bytes=max(held, wider) - 1)
    assert findings("", LOOP, small) == [f"{max(held, wider)} bytes of tensors at once, of {small.tile_bytes}"]


def test_what_a_loop_reads_from_outside_lives_to_its_end() -> None:
    outside = """
    %1 = tensor.generate : tensor<8xf32>
    scf.while (%arg1 = %c0) : (i64) -> i64 {
      scf.condition(%arg1) %arg1 : i64
    } do {
      %2 = arith.negf %1 : tensor<8xf32>
      %3 = arith.extf %cst : tensor<4xf32> to tensor<9xf64>
    }
    """
    # the outer tensor beside 72 bytes that are made after its last use: the next turn reads it again
    assert findings("", outside, LIMITS) == ["104 bytes of tensors at once, of 100"]
    assert findings("", outside.replace("%2 = arith.negf %1", "%2 = arith.negf %9"), LIMITS) == []


@pytest.mark.parametrize(
    ("ttir", "lowered", "expected"),
    [
        ('%4 = tt.elementwise_inline_asm "mov" %3', "", "inline assembly"),
        ("%4 = tt.extern_elementwise %3", "", "a function of another device's library"),
        ("%4 = arith.extf %5 : tensor<4xf32> to tensor<4xf64>", "", "float64"),
        ("%6 = tt.sort %5, 0, false", "", "a sort"),
        ("%7 = tt.atomic_rmw add, %2, %6 : (tensor<64x!tt.ptr<i64>>", "", "an atomic operation on int64"),
        ("%1 = tt.make_tensor_descriptor %arg0", "", "a tensor descriptor"),
        ("", "scf.for %1 = %2 to %3 {\n} {ExtractedLoadOrStore}", "an access to memory element by element"),
    ],
)  # fmt: skip
def test_each_rule_can_fail(ttir: str, lowered: str, expected: str) -> None:
    assert findings(ttir, lowered, LIMITS) == [expected]


def test_what_a_kernel_may_do_is_not_refused() -> None:
    assert findings("%7 = tt.atomic_rmw add, %2 : (!tt.ptr<i32>)\n%1 = tt.load %0 : tensor<4xi64>", "", LIMITS) == []


MASKED = """
memref.copy {source}, %alloc : memref<?xf32> to memref<4xf32>
%1 = bufferization.to_tensor %alloc restrict writable : memref<4xf32>
%2 = arith.select %0, %1, %9 : tensor<4xi1>, tensor<4xf32>
"""


def test_a_mask_must_bound_what_is_read() -> None:
    assert findings("", MASKED.format(source="%subview_3"), LIMITS) == []
    found = findings("", MASKED.format(source="%reinterpret_cast"), LIMITS)
    assert found == ["an access of 4xf32 that its mask does not bound"]


# ------------------------------------------------------------------------------------------------ launches


@pytest.fixture
def meta_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without memory are those of an NPU."""
    spec, plugin = registry().devices["npu"]
    monkeypatch.setitem(registry().devices, "meta", (dataclasses.replace(spec, torch_type="meta"), plugin))
    programs.limits.cache_clear()
    yield
    programs.limits.cache_clear()


class Recorder:
    """In a kernel's place; keeps the grids, and what each launch says its first program is."""

    def __init__(self, kernel: Any) -> None:
        self.at = kernel.arg_names.index("first")
        self.grids: list[int] = []
        self.firsts: list[int | None] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.grids.append(grid[0])
            self.firsts.append(arguments[self.at])

        return launch


@pytest.mark.usefixtures("meta_npu")
def test_no_launch_on_an_npu_has_a_grid_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, vocab_size = 200_000, 151_936
    logits = torch.empty(num_rows, vocab_size, dtype=torch.bfloat16, device="meta")
    vector = torch.empty(num_rows, device="meta")
    rows = ScaledRows(vector.long(), -100, 1.0)
    limited = programs.limits("npu")
    assert limited is not None
    statistics, gradient = Recorder(triton_rows._statistics_kernel), Recorder(triton_rows._gradient_kernel)
    monkeypatch.setattr(triton_rows, "_statistics_kernel", statistics)
    monkeypatch.setattr(triton_rows, "_gradient_kernel", gradient)
    triton_rows.row_statistics(logits, rows, with_entropy=True)
    triton_rows.row_gradient(logits, rows, RowStatistics(vector, None, vector, vector), vector, None, out=logits)
    blocks = -(-vocab_size // triton_rows.gradient_tile("npu")["BLOCK"])
    for kernel, count in ((statistics, num_rows), (gradient, num_rows * blocks)):
        assert sum(kernel.grids) == count
        assert not any(grid_finding(grid, limited) for grid in kernel.grids)
        assert kernel.firsts == [sum(kernel.grids[:i]) for i in range(len(kernel.grids))]
    assert grid_finding(num_rows, limited) == "a grid of 200000 programs, of 65535"


# ------------------------------------------------------------------------------------------------ with the compiler

WITH_COMPILER = [pytest.mark.npu_sim, pytest.mark.timeout(600)]

RunLowering = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run_lowering(tmp_path_factory: pytest.TempPathFactory) -> RunLowering:
    """Run Python where ``triton`` is triton-ascend."""
    if sys.version_info[:2] > (3, 11):
        pytest.skip(f"triton-ascend has wheels up to Python 3.11, this is {sys.version_info[0]}.{sys.version_info[1]}")
    kept = os.environ.get("TRITON_ASCEND_ENVIRONMENT")
    try:
        python = make(Path(kept) if kept else tmp_path_factory.mktemp("triton_ascend") / "environment")
    except RuntimeError as error:
        pytest.skip(str(error))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-W", "ignore", *arguments]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
        return found

    return run


class TestWithTheCompiler:
    pytestmark = WITH_COMPILER

    def test_the_kept_report_is_what_it_says_now(self, run_lowering: RunLowering, tmp_path: Path) -> None:
        run_lowering("-m", "tests.devices.ascend.lowering", str(tmp_path / "report.json"))
        assert json.loads((tmp_path / "report.json").read_text()) == KEPT, REMAKE

    def test_the_lint_finds_what_it_lets_through(self, run_lowering: RunLowering) -> None:
        found = json.loads(run_lowering("-m", "tests.devices.ascend.planted_kernels").stdout)
        assert found == {
            "sound": [],
            "large": ["12582912 bytes of tensors at once, of 98304"],
            "assembly": ["inline assembly"],
            "wide": ["float64"],
            "sorting": ["a sort"],
            "adding": ["an atomic operation on int64"],
            "describing": ["a tensor descriptor"],
            "gathering": ["an access to memory element by element"],
            "hiding": ["an access of 16x4xf32 that its mask does not bound"],
            "skipping": ["an access of 64xf32 that its mask does not bound"],
        }

    def test_operators_choose_it_where_its_driver_is(self, run_lowering: RunLowering) -> None:
        code = """
            import json, types, torch
            from triton.runtime import driver
            from rlcore.kernels import triton_target as target
            from rlcore.kernels.dispatch import Query, choose

            def chosen():
                query = Query("npu", torch.bfloat16, 4096, 151_936)
                ops = "token_logprob", "linear_loss", "gae", "group_advantage", "strided_copy"
                return {op: choose(op, query).implementation for op in ops}

            without = chosen()
            choose.cache_clear(), target._absence_here.cache_clear()
            module = types.ModuleType("torch_npu.npu")
            architecture = types.SimpleNamespace(arch="Ascend910B1", warp_size=0)
            made = {"get_device_interface": lambda: module, "get_current_target": lambda: architecture}
            driver.set_active(types.SimpleNamespace(**made))
            print(json.dumps([without, chosen()]))
        """
        without, with_driver = json.loads(run_lowering("-c", textwrap.dedent(code)).stdout)
        plain = {"gae": "scan", "group_advantage": "reference", "strided_copy": "views"}
        assert without == {"token_logprob": "chunked", "linear_loss": "chunked"} | plain
        assert with_driver == {"token_logprob": "triton", "linear_loss": "rows"} | plain
