"""Every name, parameter and operator of torch_npu that rlcore uses is in the wheels that it claims to work with.

What is used is read from rlcore's code, what there is from wheels: here from contract.jsonl, which contract.py made of
them, and under the marker ``npu_sim`` from the wheels themselves, of both kinds of machines that have NPUs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.ascend.contract import EXTRACT, extract, missing, relied_on, together
from tests.devices.ascend.uses import ROOT, Use, uses, uses_in

CLAIMED = ("2.10.0.post4", "2.13.0", "2.14.0")
MACHINES = ("x86_64", "aarch64")
WHEELS = {entry["version"]: entry for entry in map(json.loads, EXTRACT.read_text().splitlines())}
MAY_LACK = {("2.10.0.post4", "npu.MemPool.snapshot")}
"""Asked for by hasattr, and absent there: the device says so in its capabilities."""
SENT = (
    *("type(tensor)", "tensor.size()", "tensor.stride()", "tensor_offset", "type(storage)", "tensor.dtype", "device"),
    *("handle", "storage_size_bytes", "storage_offset_bytes", "tensor.requires_grad"),
    *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
)
"""For a tensor, as ``devices/ascend/sharing.py`` takes it apart by numbers and gives it to ``rebuild_npu_tensor``."""


def test_the_extract_has_the_versions_and_machines_that_are_claimed() -> None:
    assert tuple(WHEELS) == CLAIMED
    for version, entry in WHEELS.items():
        names = [f"torch_npu-{version}-cp311-cp311-manylinux_2_28_{machine}.whl" for machine in MACHINES]
        assert list(entry["wheels"]) == names


def test_uses_are_found_in_the_code() -> None:
    """Of the plugin, of objects that it gives away, and of code that is the same for every device."""
    places = {use.name: set[str]() for use in uses()}
    for use in uses():
        places[use.name].add(use.place.partition(":")[0])
    assert {
        "npu.memory_allocated",
        "npu.MemPool.snapshot",
        "ops.get_npu_format",
        "npu.mstx.range_push",
    } <= places.keys()
    assert {"reductions.rebuild_npu_tensor", "reductions.reduce_tensor", "storage._share_npu_"} <= places.keys()
    assert "streams.py" in places["npu.Event().ipc_handle"]
    assert "pool.py" in places["npu.use_mem_pool"] & places["npu.MemPool().snapshot"]
    assert "transfer.py" in places["npu.Stream().wait_stream"] & places["npu.Stream().record_event"]
    assert "generic.py" in places["npu.default_generators"] & places["properties.name"]
    assert "ascend.py" in places["torch_npu._C._construct_storage_from_data_pointer"]
    assert len(places) >= 45


@pytest.mark.parametrize("version", CLAIMED)
def test_what_is_used_is_there(version: str) -> None:
    names = WHEELS[version]["names"]
    lacking = {use.name.replace("()", ""): reason for use in uses() if (reason := missing(use, names))}
    asked = {use.name for use in uses() if use.is_optional}
    assert {name: reason for name, reason in lacking.items() if name not in asked} == {}
    assert {(version, name) for name in lacking} == {pair for pair in MAY_LACK if pair[0] == version}


@pytest.mark.parametrize("version", CLAIMED)
def test_hccl_is_made_as_rlcore_asks_for_it_and_what_is_sent_for_a_tensor_is_what_opens_it(version: str) -> None:
    names = WHEELS[version]["names"]
    assert names["hccl"] == ["devices=['npu']", "extended_api=True"]
    assert tuple(names["reductions.reduce_tensor()"]) == SENT
    assert len(names["reductions.rebuild_npu_tensor"]) == len(SENT)


def test_what_operators_take_where_they_are_given_nothing_is_the_same_in_all_versions() -> None:
    operators = [use for use in uses() if use.name.startswith("ops.") and use.is_call]
    assert any(relied_on(use, WHEELS["2.13.0"]["names"]) for use in operators)
    for use in operators:
        oldest, *newer = (relied_on(use, WHEELS[version]["names"]) for version in CLAIMED)
        for found in newer:
            assert {name: found.get(name) for name in oldest} == oldest, use


def test_the_page_says_what_is_absent_and_which_versions_were_read() -> None:
    page = " ".join((ROOT / "docs" / "ascend.md").read_text("utf-8").split())
    assert f"{', '.join(CLAIMED[:-1])} and {CLAIMED[-1]} have every one but this" in page
    told = re.findall(r"`(npu[\w.]+)` is absent from ([\w.]+\w)", page)
    assert {(version, name) for name, version in told} == MAY_LACK


# ------------------------------------------------------------------------------------------------ what is found

_NPU = "npu().{}"
_GENERIC = """
class Any:
    @property
    def _module(self): return torch.get_device_module(self.device)
    def use(self): self._pool = self._module.MemPool(); self._module.{}
"""
_POOL = """
class Pool:
    def __init__(self, device): self._module = torch.get_device_module(device)
    def enter(self): self._pool = self._module.MemPool({})
    def stats(self): return [] if self._pool is None else self._pool.{}
"""
_STREAMS = """
class Transfer:
    def __init__(self, device): self._streams = {{int: device.streams.new()}}
    def run(self, device):
        stream = self._streams[int]
        stream.{}
"""
_EVENT = """
def export(event):
    if not isinstance(event, npu().Event): raise TypeError
    return event.{}
"""
_ATTENTION = "torch.ops.npu.npu_fusion_attention(q, k, v, {})"
_TAKES = "ops.npu_fusion_attention takes"
_REBUILD = """
def _reductions(): return importlib.import_module('torch_npu.multiprocessing.reductions')
_reductions().rebuild_npu_tensor(tensor=1)
"""
_REDUCE = "send = torch.multiprocessing.reductions.reduce_tensor; send(tensor, 1)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (_NPU.format("memory_alocated(0)"), "npu.memory_alocated is absent"),
        (_NPU.format("memory_allocated(0, 1)"), "npu.memory_allocated takes 1 by position, is given 2"),
        (_NPU.format("set_device()"), "npu.set_device is not given device"),
        (_NPU.format("MemPool(alocator=None)"), "npu.MemPool has no alocator"),
        (_NPU.format("mstx.range_pus('x')"), "npu.mstx.range_pus is absent"),
        (_NPU.format("Event(enable_timing=True, inter_process=True)"), "npu.Event has no inter_process"),
        (_NPU.format("Event.from_ipc_handle(0)"), "npu.Event.from_ipc_handle is not given handle"),
        (_GENERIC.format("use_mempool(self._pool)"), "npu.use_mempool is absent"),
        (_GENERIC.format("use_mem_pool()"), "npu.use_mem_pool is not given pool"),
        (_GENERIC.format("get_device_properties(0).cube_cores"), "properties.cube_cores is absent"),
        (_POOL.format("", "snapshots()"), "npu.MemPool().snapshots is absent"),
        (_POOL.format("", "snapshot(True)"), "npu.MemPool().snapshot takes 0 by position, is given 1"),
        (_POOL.format("no_splits=True", "snapshot()"), "npu.MemPool has no no_splits"),
        (_STREAMS.format("wait_strem(stream)"), "npu.Stream().wait_strem is absent"),
        (_STREAMS.format("wait_stream()"), "npu.Stream().wait_stream is not given stream"),
        (_EVENT.format("ipc_handel()"), "npu.Event().ipc_handel is absent"),
        (_EVENT.format("ipc_handle(0)"), "npu.Event().ipc_handle takes 0 by position, is given 1"),
        ("def put(event: torch.Event): event.recrod()", "npu.Event().recrod is absent"),
        ("torch.ops.npu.npu_rms_norms(x, gamma)", "ops.npu_rms_norms is absent"),
        ("torch.ops.npu.npu_rms_norm(x, gamma, eps=1e-6)", "ops.npu_rms_norm has no eps"),
        ("torch.ops.npu.npu_rms_norm(x)", "ops.npu_rms_norm is not given gamma"),
        ("torch.ops.npu.npu_rms_norm(x, gamma, '1e-6')", "ops.npu_rms_norm takes float for epsilon, is given '1e-6'"),
        (_ATTENTION.format("4.0, 'TND'"), f"{_TAKES} int for head_num, is given 4.0"),
        (_ATTENTION.format("4, 'TND', sparse_mode=None if x else 3"), f"{_TAKES} int for sparse_mode, is given None"),
        (_ATTENTION.format("4, 'TND', prefix=3"), f"{_TAKES} Optional[List[int]] for prefix, is given 3"),
        (_REBUILD, "reductions.rebuild_npu_tensor has no tensor"),
        (_REDUCE, "reductions.reduce_tensor takes 1 by position, is given 2"),
        ("torch.TypedStorage._share_npus_", "storage._share_npus_ is absent"),
        ("torch_npu._C._construct_storage_from_pointer(1)", "torch_npu._C._construct_storage_from_pointer is absent"),
    ],
)
def test_what_is_not_there_is_found(code: str, reason: str) -> None:
    names = WHEELS["2.13.0"]["names"]
    streams = {"new": "npu.Stream()"}
    found = [missing(use, names) for use in uses_in(ast.parse(code), "code", streams)]
    assert [text.partition(": ")[2] for text in found if text] == [reason]


def test_a_use_by_its_right_name_is_not_reported() -> None:
    use = Use("ops.npu_rms_norm", arguments=("x", "gamma"), keywords=(("epsilon", "1e-6"),), is_call=True)
    assert missing(use, WHEELS["2.13.0"]["names"]) == ""


def test_a_default_that_another_version_has_otherwise_is_found() -> None:
    use = Use("ops.npu_swiglu", arguments=("x",), is_call=True)
    schemas = ["npu_swiglu(Tensor self, int dim=-1) -> Tensor", "npu_swiglu(Tensor self, int dim=0) -> Tensor"]
    assert [relied_on(use, {use.name: [schema]}) for schema in schemas] == [{"dim": "int = -1"}, {"dim": "int = 0"}]


def test_wheels_of_one_version_that_differ_are_refused() -> None:
    one = {"version": "2.13.0", "wheels": {"a.whl": "1"}, "names": {"npu.init": []}}
    other = {"version": "2.13.0", "wheels": {"b.whl": "2"}, "names": {"npu.init": ["device"]}}
    assert together([one, one | {"wheels": {"b.whl": "2"}}])["wheels"] == {"a.whl": "1", "b.whl": "2"}
    with pytest.raises(ValueError, match=r"a\.whl, b\.whl do not say the same"):
        together([one, other])


# ------------------------------------------------------------------------------------------------ the wheels


@pytest.mark.npu_sim
@pytest.mark.parametrize("version", CLAIMED)
def test_the_extract_is_of_the_wheels(version: str, tmp_path: Path) -> None:
    assert together([extract(_wheel(version, machine, tmp_path)) for machine in MACHINES]) == WHEELS[version]


def _wheel(version: str, machine: str, tmp_path: Path) -> Path:
    """Kept in the folder that CANN_SIM_WHEELS names, if any."""
    kept = os.environ.get("CANN_SIM_WHEELS")
    folder = Path(kept) if kept else tmp_path
    pattern = f"torch_npu-{version}-*_{machine}.whl"
    if not list(folder.glob(pattern)):
        target = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", "--dest", str(folder)]
        platform = ["--implementation", "cp", "--platform", f"manylinux_2_28_{machine}"]
        command: list[Any] = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "download",
            *target,
            *platform,
            f"torch-npu=={version}",
        ]
        loaded = subprocess.run(command, capture_output=True, text=True, check=False)
        if loaded.returncode:
            pytest.skip(f"torch-npu {version} cannot be downloaded: {loaded.stderr.strip().splitlines()[-1]}")
    (found,) = folder.glob(pattern)
    return found
