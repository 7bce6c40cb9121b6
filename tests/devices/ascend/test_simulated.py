"""The real torch_npu wheel over the simulated CANN: what a machine without an NPU can show of rlcore on one.

The simulation is synchronous and computes with the CPU's kernels: nothing here is about speed, order of streams, or an
NPU's numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.devices.ascend.simulation import counted
from rlcore.types import Simulation
from tests.accuracy import assert_within_rounding
from tests.devices.ascend.uses import uses

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(1200)]

TASKS = Path(__file__).with_name("simulated_tasks.py")
ROUNDS = Path(__file__).parents[2] / "engines" / "weight_sync" / "test_rounds_on_gpus.py"


def operators(folder: Path) -> Simulation:
    """What every process of the run asked for."""
    return counted("simulated CANN", (folder / "cann.log").read_text().splitlines())


def test_the_device_passes_the_conformance_suite(run_simulated: Any, tmp_path: Path) -> None:
    suite = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "rlcore.conformance")
    options = ("--device", "npu", "--require", "ipc,pool,host_alloc,interprocess_events")
    record = tmp_path / "uses"
    report_to = ("--conformance-json", "report.json")
    found = run_simulated(*suite, *options, *report_to, timeout_s=1180, CANN_SIM_RECORD=str(record))
    assert found.returncode == 0, found.stdout
    assert not unseen(record)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"]["product"] == "Ascend910B1 (simulated CANN)"
    assert {member["evidence"] for member in report["members"].values()} == {"simulated"}
    asked = operators(tmp_path)
    assert report["simulation"] == asked.counted()
    assert report["versions"]["torch-npu"].startswith("2.") and report["versions"]["CANN"].endswith("-simulated")
    assert str(asked) in found.stdout
    assert len(asked.operators) > 50 and not asked.refused
    assert {member["result"] for member in report["members"].values()} == {"passed"}


def unseen(record: Path) -> dict[str, str]:
    """What was asked of torch_npu while it ran, and is not among the uses that are held against the wheels."""
    known = {use.name for use in uses()}
    lines = dict(line.split(" ", 1) for line in record.read_text().splitlines())
    assert {
        "npu.Event().ipc_handle",
        "npu.MemPool().snapshot",
        "npu.use_mem_pool",
        "ops.get_npu_format",
    } <= lines.keys()
    return {name: place for name, place in lines.items() if name not in known}


_IN_RLCORE = """\
import rlcore, torch
torch.get_device_module("npu")  # not from a file of rlcore's
code = "import torch; getattr(torch.npu, 'current_' + 'device')(); torch.npu.Event().record()"
exec(compile(code, rlcore.__path__[0] + "/made_up.py", "exec"))
"""


def test_a_use_that_reading_the_code_does_not_find_is_recorded_where_it_runs(
    run_simulated: Any, tmp_path: Path
) -> None:
    record = tmp_path / "uses"
    found = run_simulated("-c", _IN_RLCORE, CANN_SIM_RECORD=str(record))
    assert found.returncode == 0, found.stderr
    lines = record.read_text().splitlines()
    assert lines == ["npu.current_device made_up.py:1", "npu.Event made_up.py:1", "npu.Event().record made_up.py:1"]
    assert "npu.current_device" not in {use.name for use in uses()}


_SAYS = """\
import json, torch, rlcore
device = rlcore.get_device("npu")
(torch.ones(2, device="npu") + 1).tolist()
try:
    torch.ops.npu.npu_rotary_mul(*[torch.ones(1, 1, 1, 8, device="npu")] * 3)
except NotImplementedError:
    pass
found = device.simulation()
capabilities = {how.evidence for how in device.capabilities().values()}
print(json.dumps([device.properties().name, *capabilities, found.counted() if found else None]))
"""


def test_the_stand_in_is_known_by_what_it_says_itself_and_not_by_a_variable(run_simulated: Any, tmp_path: Path) -> None:
    name, evidence, counted = json.loads(run_simulated("-c", _SAYS, RLCORE_SIMULATED="0").stdout)
    assert (name, evidence) == ("Ascend910B1 (simulated CANN)", "simulated")
    assert {
        "name": "simulated CANN",
        "operators_refused": 1,
        "refused": ["npu::npu_rotary_mul"],
    }.items() <= counted.items()
    assert counted["operators_simulated"] == len(operators(tmp_path).operators) > 1


def test_no_variable_makes_a_library_that_does_not_say_so_a_simulation(
    run_simulated: Any, libraries: Path, tmp_path: Path
) -> None:
    """As CANN's own is: without the function by which a stand-in tells its name."""
    silent = tmp_path / "cann"
    shutil.copytree(libraries, silent)
    library = silent / "libascendcl.so"
    library.write_bytes(library.read_bytes().replace(b"rlcore_simulation", b"silent_simulation"))
    found = run_simulated("-c", _SAYS, RLCORE_SIMULATED="1", LD_LIBRARY_PATH=str(silent))
    assert json.loads(found.stdout) == ["Ascend910B1", "declared", None], found.stderr


def test_where_cann_tells_no_uuid_npus_are_told_apart(run_simulated: Any, libraries: Path, tmp_path: Path) -> None:
    """As older CANN, which lacks the function: torch_npu looks it up as it runs, and says nil of every device."""
    older = tmp_path / "cann"
    shutil.copytree(libraries, older)
    library = older / "libascendcl.so"
    assert library.read_bytes().count(b"aclrtDeviceGetUuid\0") >= 1
    library.write_bytes(library.read_bytes().replace(b"aclrtDeviceGetUuid\0", b"aclrtDeviceGotUuid\0"))
    found = answers(run_simulated(str(TASKS), "between_npus", LD_LIBRARY_PATH=str(older)))["between_npus"]
    assert found["told"] == "00000000-0000-0000-0000-000000000000"
    assert found["npu:0"] != found["npu:1"]
    assert found["1"] == "[0.0, 1.0, 2.0]", "the same NPU, which that process knows as npu:0"
    assert f"DeviceError: this memory is of the NPU {found['npu:1']}; npu:0 is {found['npu:0']}" in found["0"]


_OF_A_CHILD = """\
import os, subprocess, sys, torch, rlcore
subprocess.run([sys.executable, "-c", "import torch; torch.ones(1, device='npu').exp().tolist()"], check=True)
print(os.environ["CANN_SIM_LOG"], "aten::exp" in rlcore.get_device("npu").simulation().operators)
"""


def test_a_run_without_a_log_has_one_for_all_its_processes_and_leaves_none(run_simulated: Any) -> None:
    found = run_simulated("-c", _OF_A_CHILD, CANN_SIM_LOG=None)
    path, is_told = found.stdout.split()
    assert is_told == "True"
    assert not Path(path).exists()


def answers(found: Any) -> dict[str, Any]:
    """Of each task."""
    assert found.returncode == 0, found.stdout + found.stderr
    told: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    failed = {name: answer for name, answer in told.items() if isinstance(answer, str) and "Traceback" in answer}
    assert not failed, "\n".join(failed.values())
    return told


ALONE = ("norms", "attention", "offloaded_training", "vendor_format", "refusals", "hccl_options")


@pytest.fixture(scope="module")
def told(run_simulated_in: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tasks of one process answer, and, as "operators", what they asked for."""
    folder = tmp_path_factory.mktemp("tasks")
    return answers(run_simulated_in(folder, str(TASKS), *ALONE)) | {"operators": set(operators(folder).operators)}


def test_sharded_training_over_hccl_learns_what_the_host_does(run_simulated: Any, tmp_path: Path) -> None:
    found = answers(run_simulated(str(TASKS), "sharded_training"))["sharded_training"]
    there, here = (torch.tensor(found[kind]["weight"], dtype=torch.float64) for kind in ("npu", "cpu"))
    # A step moves a weight by up to 0.01, by a gradient that has gone through the sums of two layers and back. Those
    # of a layer are over hidden states (six times), tokens (twice) and what is between up and down.
    steps, layers, hidden, tokens, between, vocabulary = 4, 2, 32, 31, 64, 21
    terms = steps * 2 * (layers * (6 * hidden + 2 * tokens + between) + vocabulary)
    magnitude = torch.full_like(here, steps * 0.01)
    assert_within_rounding(there, here, terms=terms, magnitude=magnitude, dtype=torch.float32, what="trained weights")
    losses = found["npu"]["losses"]
    assert losses[-1] < losses[0]
    asked = operators(tmp_path)
    assert {"HcclAllGather", "HcclReduceScatter"} <= set(asked.operators)
    assert {"npu::npu_rms_norm", "npu::npu_rms_norm_backward"} <= set(asked.operators)
    assert not asked.refused


def test_the_vendors_norm_is_taken_where_it_gives_what_the_module_gives(told: dict[str, Any]) -> None:
    said = told["norms"]
    for dtype, own, other in zip(("float32", "bfloat16"), said[::2], said[1::2], strict=True):
        where = f"32 in torch.{dtype} on npu"
        assert own == f"Qwen2RMSNorm of {where}: npu_rms_norm runs"
        assert other.startswith(f"GemmaRMSNorm of {where}: not npu_rms_norm: its probe gave another output")


def test_offloaded_training_goes_on_where_it_was(told: dict[str, Any]) -> None:
    """Bit for bit: the same operations, of the same values in other memory."""
    found = told["offloaded_training"]
    assert found["with moves"] == found["without"]
    assert found["device bytes away"] < 0.1 * found["device bytes before"]


def test_weights_reach_another_process_by_every_route(run_simulated: Any, tmp_path: Path) -> None:
    torch_npus_own = "ignore:TypedStorage is deprecated:UserWarning"
    options = ("-q", "-p", "no:cacheprovider", "-W", torch_npus_own, "-m", "npu_sim")
    found = run_simulated("-m", "pytest", *options, str(ROUNDS))
    assert found.returncode == 0, found.stdout
    assert "3 passed" in found.stdout  # direct and packed on one NPU, a group of two
    asked = operators(tmp_path)
    assert {"HcclSend", "HcclRecv"} <= set(asked.operators) and not asked.refused


_WRONG = """\
import torch
x = torch.ones(2, 8, device="npu")
for operator, arguments, options in (
    (torch.ops.npu.npu_rotary_mul, [torch.ones(1, 1, 1, 8, device="npu")] * 3, {}),
    (torch.ops.npu.npu_rms_norm, [x, x[0]], {"eps": 1e-6}),
):
    try:
        operator(*arguments, **options)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        print(str(error).splitlines()[0])
"""


def test_what_is_not_simulated_fails_and_a_wrong_keyword_is_refused_by_the_wheels_own_schema(
    run_simulated: Any, tmp_path: Path
) -> None:
    found = run_simulated("-c", _WRONG)
    not_simulated, wrong = found.stdout.splitlines()
    assert "npu::npu_rotary_mul is not simulated (simulated CANN)" in not_simulated
    assert "Unknown keyword argument 'eps'" in wrong
    assert operators(tmp_path).refused == ("npu::npu_rotary_mul",)


def test_a_tensor_in_a_vendors_format_is_not_shared(told: dict[str, Any]) -> None:
    assert "sharing a tensor in NPU memory format 29" in told["vendor_format"]


def test_handles_and_dtypes_that_cannot_be_served_are_refused(told: dict[str, Any]) -> None:
    """The exporter's NPU is its npu:1; an importer that sees it alone knows it as npu:0."""
    found = told["refusals"]
    assert found["1"] == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]"
    for visible in ("0", "0,1"):
        assert "DeviceError: this memory is of the NPU" in found[visible]
        assert "import the handle with the device of that uuid" in found[visible]
    assert (
        "was made on another machine, or before this one was restarted (boot of another host" in found["another host"]
    )
    assert found["float64"] == "[1.0, 1.0, 1.0]"  # HCCL does not sum it: rlcore does
    assert found["complex64"].startswith("UnsupportedError: max of complex64 over")
    assert "complex numbers have no order" in found["complex64"]


def test_settings_of_hccl_reach_a_group_that_is_made_with_init_kwargs(told: dict[str, Any]) -> None:
    assert told["hccl_options"] == {"123": 123, "much": "Value type of hccl_buffer_size should be int."}


def test_the_vendors_attention_is_taken_where_it_gives_what_plain_torch_gives(told: dict[str, Any]) -> None:
    found = dict(told["attention"])
    assert found.pop("chosen") == "npu_fusion_attention"
    for name, reason in found.items():
        assert reason == ("it is used without softcap" if name.startswith("softcap") else None), name
    assert {"npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"} <= told["operators"]
