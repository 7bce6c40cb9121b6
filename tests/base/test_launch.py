"""Launch facts: what a vendor's variable means, and what a worker's must be. No device is needed for any of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import DeviceError, InvalidInputError
from rlcore.launch import LaunchFacts
from rlcore.registry import launch

UUIDS = [f"{number}{number}c5b9d6-0000-0000-0000-00000000000{number}" for number in range(8)]


def visible(value: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": value, "HOME": "/home/someone"}


@pytest.fixture
def cuda() -> LaunchFacts:
    return launch("cuda")


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("0", ["0"]),
        ("4,6", ["4", "6"]),
        (" 6 , 4 ", ["6", "4"]),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1"]),
        ("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6", ["MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"]),
        ("MIG-GPU-8932f937/1/0", ["MIG-GPU-8932f937/1/0"]),
        ("0.1,2", ["0.1", "2"]),  # tiles of ZE_AFFINITY_MASK
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("1,-1,2", ["1"]),
        ("1,,2", ["1"]),
        ("1,1", []),
        ("²", []),
    ],
)
def test_the_variable_is_read_as_the_driver_does(cuda: LaunchFacts, value: str, ids: list[str]) -> None:
    assert cuda.visible_devices(visible(value)) == ids


@pytest.mark.parametrize("value", ["2,0", "1,-1,2", "1,1", "", "-1", "NoDevFiles"])
def test_torch_reads_it_alike(cuda: LaunchFacts, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import _parse_visible_devices

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [str(number) for number in _parse_visible_devices()] == cuda.visible_devices()


def test_without_the_variable_all_are_visible(cuda: LaunchFacts) -> None:
    assert cuda.visible_devices({}) is None
    assert cuda.physical_id(3, {}) == "3"
    assert cuda.visible_uuids(UUIDS, {}) == UUIDS
    assert cuda.worker_environment([1, 2], {}) == {"CUDA_VISIBLE_DEVICES": "1,2"}


def test_a_worker_gets_what_its_parent_calls_by_that_index(cuda: LaunchFacts) -> None:
    environ = visible("4,6")
    assert cuda.worker_environment([1], environ) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert cuda.worker_environment([1, 0], environ) == {"CUDA_VISIBLE_DEVICES": "6,4"}
    assert cuda.worker_environment([0], visible("GPU-8932f937")) == {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}
    assert cuda.worker_environment([], environ) == {"CUDA_VISIBLE_DEVICES": ""}


def test_workers_of_workers_compose(cuda: LaunchFacts) -> None:
    environ = visible("7,5,3,1")
    for indices in ([1, 2, 3], [1, 2], [1]):
        environ = environ | cuda.worker_environment(indices, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_uuid_is_found_whatever_the_numbers_are(cuda: LaunchFacts) -> None:
    exporter, importer = visible("4,6"), visible("6,2,4")
    uuid = cuda.visible_uuids(UUIDS, exporter)[1]
    assert uuid == UUIDS[6]
    assert cuda.visible_uuids(UUIDS, importer).index(uuid) == 0
    by_name = visible(f"GPU-{UUIDS[3]},GPU-{UUIDS[6][:8].upper()}")
    assert cuda.visible_uuids(UUIDS, by_name) == [UUIDS[3], UUIDS[6]]
    assert cuda.visible_uuids([f"GPU-{uuid}" for uuid in UUIDS], by_name) == [f"GPU-{UUIDS[3]}", f"GPU-{UUIDS[6]}"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("1,8,2", [UUIDS[1]]),  # the machine has 0 to 7
        ("GPU-ffff,1", []),
        (f"6,GPU-{UUIDS[6]}", []),  # one device by two names
        ("MIG-8932f937,1", []),  # part of a device has a uuid of its own
    ],
)
def test_what_the_machine_does_not_have_ends_the_list(cuda: LaunchFacts, value: str, found: list[str]) -> None:
    assert cuda.visible_uuids(UUIDS, visible(value)) == found


def test_a_uuid_cut_short_must_mean_one_device(cuda: LaunchFacts) -> None:
    assert cuda.visible_uuids(["aa-1", "aa-2", "ab-1"], visible("GPU-ab")) == ["ab-1"]
    assert cuda.visible_uuids(["aa-1", "aa-2", "ab-1"], visible("GPU-a")) == []


def test_an_index_that_is_not_visible_is_refused(cuda: LaunchFacts) -> None:
    with pytest.raises(DeviceError) as caught:
        cuda.worker_environment([0, 2], visible("4,6"))
    assert str(caught.value) == (
        "device 'cuda:2' is not visible: CUDA_VISIBLE_DEVICES names 2 of them, ['4', '6']; "
        "change it before the process starts"
    )


@pytest.mark.parametrize("index", [-1, "0", True, None, 1.0])
def test_what_is_no_index_is_refused(cuda: LaunchFacts, index: Any) -> None:
    with pytest.raises(InvalidInputError, match="the index of a device is a whole number of at least 0, got "):
        cuda.physical_id(index, {})


def test_an_index_twice_is_refused(cuda: LaunchFacts) -> None:
    with pytest.raises(InvalidInputError, match=r"sees each device once; these indices repeat: \[1, 0, 1\]"):
        cuda.worker_environment([1, 0, 1], {})


def test_a_device_without_a_variable_needs_none() -> None:
    cpu = launch("cpu:3")
    assert (cpu.visible_devices_variable, cpu.visible_devices(os.environ)) == (None, None)
    assert cpu.worker_environment([3], {"": "7"}) == {}
    assert cpu.ray_resource == "CPU"


def test_the_facts_of_cuda(cuda: LaunchFacts) -> None:
    assert (cuda.visible_devices_variable, cuda.ray_resource) == ("CUDA_VISIBLE_DEVICES", "GPU")


def test_launch_facts_need_no_device_and_no_torch(run_python: Any) -> None:
    code = (
        "import sys; from rlcore.registry import launch; facts = launch('cuda:1');"
        "print(facts.worker_environment([1]), 'torch' in sys.modules)"
    )
    printed = run_python(code, env={"CUDA_VISIBLE_DEVICES": "4,6"}).stdout
    assert printed == "{'CUDA_VISIBLE_DEVICES': '6'} False\n"


def test_facts_of_an_unknown_device_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"^no device 'tpu'; registered: "):
        launch("tpu")
    with pytest.raises(InvalidInputError, match="the name of a device is a str such as 'cuda' or 'cuda:1', got 0"):
        launch(0)  # type: ignore[arg-type]


def test_the_example_of_the_documentation_gives_what_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    setup, _, lines = example.partition("\n\n")
    exec(f"{setup}\n{lines.splitlines()[0]}", names)
    shown = [line.partition("  #") for line in lines.splitlines()[1:]]
    assert len(shown) == 4
    for code, _, result in shown:
        assert eval(code, names) == eval(result.partition(";")[0])
