"""Every name, parameter and operator of torch_npu that rlcore uses is in the wheels that it claims to work with.

What is used is read from rlcore's code, what there is from wheels: here from contract.jsonl, which contract.py made of
them, and under the marker ``npu_sim`` from the wheels themselves.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.ascend.contract import EXTRACT, ROOT, Use, extract, missing, table, uses, uses_in

CLAIMED = ("2.10.0.post4", "2.13.0", "2.14.0")
WHEELS = {json.loads(line)["wheel"].split("-")[1]: json.loads(line) for line in EXTRACT.read_text().splitlines()}
MAY_LACK = {("2.10.0.post4", "npu.MemPool.snapshot")}
"""Asked for by hasattr, and absent there: the device says so in its capabilities."""


def test_the_extract_has_the_versions_that_are_claimed() -> None:
    assert tuple(WHEELS) == CLAIMED


def test_uses_are_found_in_the_code() -> None:
    found = {use.name for use in uses()}
    assert found >= {"npu.memory_allocated", "npu.MemPool.snapshot", "ops.get_npu_format", "npu.mstx.range_push"}
    assert found >= {"reductions.rebuild_npu_tensor", "storage._release_ipc_counter_npu", "storage._share_npu_"}
    assert len(found) >= 25


@pytest.mark.parametrize("version", CLAIMED)
def test_what_is_used_is_there(version: str) -> None:
    names = WHEELS[version]["names"]
    lacking = {use.name: reason for use in uses() if (reason := missing(use, names)) and not use.is_optional}
    assert not lacking
    optional = {(version, use.name) for use in uses() if use.is_optional and missing(use, names)}
    assert optional == {pair for pair in MAY_LACK if pair[0] == version}


def test_the_docs_have_the_table_of_now() -> None:
    text = (ROOT / "docs" / "ascend.md").read_text()
    (found,) = re.findall("<!-- contract -->\n(.*?)\n<!-- /contract -->", text, re.DOTALL)
    assert found == table(WHEELS), f"put this there:\n{table(WHEELS)}"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("npu().memory_alocated(0)", "npu.memory_alocated is absent"),
        ("npu().memory_allocated(0, 1)", "npu.memory_allocated takes 1 by position, is given 2"),
        ("npu().MemPool(alocator=None)", "npu.MemPool has no alocator"),
        ("npu().mstx.range_pus('x')", "npu.mstx.range_pus is absent"),
        ("torch.ops.npu.npu_rms_norm(x, gamma, eps=1e-6)", "ops.npu_rms_norm has no eps"),
        ("_reductions().rebuild_npu_tensor(tensor=1)", "reductions.rebuild_npu_tensor has no tensor"),
    ],
)
def test_what_is_not_there_is_found(tmp_path: Path, code: str, reason: str) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    (use,) = uses_in(path)
    assert missing(use, WHEELS["2.13.0"]["names"]) == f"code.py:1: {reason}"


def test_a_use_by_its_right_name_is_not_reported() -> None:
    use = Use("ops.npu_rms_norm", num_positional=2, keywords=("epsilon",), is_call=True)
    assert missing(use, WHEELS["2.13.0"]["names"]) == ""


@pytest.mark.npu_sim
@pytest.mark.parametrize("version", CLAIMED)
def test_the_extract_is_of_the_wheel(version: str, tmp_path: Path) -> None:
    wheel = _wheel(version, tmp_path)
    found = extract(wheel)
    if found["sha256"] != WHEELS[version]["sha256"]:
        pytest.skip(f"{wheel.name} is another build than the one of the extract, {WHEELS[version]['wheel']}")
    assert found == WHEELS[version]


def _wheel(version: str, tmp_path: Path) -> Path:
    """Kept in the folder that CANN_SIM_WHEELS names, if any."""
    kept = os.environ.get("CANN_SIM_WHEELS")
    folder = Path(kept) if kept else tmp_path
    if not (found := list(folder.glob(f"torch_npu-{version}-*.whl"))):
        target = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", "--dest", str(folder)]
        command: list[Any] = [sys.executable, "-m", "pip", "--quiet", "download", *target, f"torch-npu=={version}"]
        loaded = subprocess.run(command, capture_output=True, text=True, check=False)
        if loaded.returncode:
            pytest.skip(f"torch-npu {version} cannot be downloaded: {loaded.stderr.strip().splitlines()[-1]}")
        found = list(folder.glob(f"torch_npu-{version}-*.whl"))
    return found[0]
