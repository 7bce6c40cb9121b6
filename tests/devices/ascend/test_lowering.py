"""Which Triton kernels triton-ascend lowers for an NPU, what the lint says of them, and which of them are offered.

The compiler runs under the marker ``npu_sim``.
TRITON_ASCEND_ENVIRONMENT names a folder to keep the compiler's environment in.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.kernels import triton_programs as programs
from rlcore.kernels.softmax_rows import RowStatistics, ScaledRows
from rlcore.registry import registry
from rlcore.types import ProgramLimits
from tests.devices.ascend.kernel_lint import findings, grid_finding
from tests.devices.ascend.triton_environment import make
from tests.warm import LIMIT_S

pytest.importorskip("triton", reason="triton has no build for this platform")

from rlcore.kernels.token import triton_rows
from tests.devices.ascend.offers import implementations
from tests.kernels.triton_cases import PORTABLE

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "ascend.md"
LIMITS = ProgramLimits(tile_bytes=100, num_programs=10)


# ------------------------------------------------------------------------------------------------ what is offered


def test_the_page_says_which_implementations_an_npu_is_offered_and_why_not_the_others() -> None:
    """Found without the compiler: limits of the device which change, such as float64 in programs, change it."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `(\w+)` \| (yes|no: .+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    told = {(op, name): said for ops, name, said in rows for op in re.findall(r"\w+", ops)}
    assert told == {
        (entry["op"], entry["name"]): "yes" if entry["refusal"] is None else f"no: {entry['refusal']}"
        for entry in implementations()
    }
    offered = {file for entry in implementations() if entry["refusal"] is None for file in entry["files"]}
    assert offered == {"token.triton_rows"}


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

    def test_every_kernel_lowers_and_the_lint_finds_something_in_those_that_are_not_offered_alone(
        self, run_lowering: RunLowering
    ) -> None:
        """A file that it finds nothing in any more could be offered."""
        kernels = json.loads(run_lowering("-m", "tests.devices.ascend.lowering").stdout)
        assert kernels.keys() == PORTABLE.keys()
        assert {name: kernel["message"] for name, kernel in kernels.items() if kernel["message"]} == {}
        offered = {file for entry in implementations() if entry["refusal"] is None for file in entry["files"]}
        found = {name: kernel["findings"] for name, kernel in kernels.items() if kernel["file"] in offered}
        assert {name: findings for name, findings in found.items() if findings} == {}
        faulty = {kernel["file"] for kernel in kernels.values() if kernel["findings"]}
        assert faulty == {kernel["file"] for kernel in kernels.values()} - offered

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
