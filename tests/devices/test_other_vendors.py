"""Vendors that torch carries need a DeviceSpec and no code: tests/plugins/other_vendors, as an installed distribution.

This machine has none of their devices. What is proven is that they are listed with a clear reason, get nobody's place,
and have their launch facts; and, with stand-ins for what torch would say there, which of two vendors that share torch's
device type "cuda" a machine has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.warm import LIMIT_S, warm

PLUGIN = Path(__file__).parent.parent / "plugins" / "other_vendors"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of ``CASES`` prints where the plugin is installed: as its pyproject.toml says, without building it.

    Each is a fork of one process, which has imported torch alone.
    """
    folder = tmp_path_factory.mktemp("vendors")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["rlcore"].values()
    shutil.copy(PLUGIN / f"{module}.py", folder)
    info = folder / f"{module}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = "\n".join(f"{name} = {path}" for name, path in project["entry-points"]["rlcore"].items())
    (info / "entry_points.txt").write_text(f"[rlcore]\n{entries}\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCORE_")}
    done = subprocess.run(
        [*warm(), "-c", FORKS, json.dumps([[*case] for case in CASES.values()])],
        env=env | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "RLCORE_STRICT_PLUGINS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, done.stdout.split("--\n")[1:], strict=True))


FORKS = """
import json, os, sys
import torch
for code, variables in json.loads(sys.argv[1]):
    print("--", flush=True)
    if os.fork() == 0:
        os.environ.update(variables)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""
# Stand-ins for what a ROCm or CUDA build says on its machine; no device is used.
TOLD_APART = """
import torch
torch.version.cuda = torch.version.hip = None
torch.version.{build} = "7.0"
torch.cuda.device_count = lambda: 4
import rlcore
print(sorted(i.name for i in rlcore.list_devices() if i.is_available))
for wanted in (None, torch.device("cuda:2")):
    found = rlcore.get_device(wanted)
    print(found.name, found.torch_device, found.collectives.backend)
"""
LISTED = "import json, rlcore; print(json.dumps({i.name: [i.vendor, i.reason] for i in rlcore.list_devices()}))"
FACTS = "from rlcore.registry import launch; print(launch('rocm').worker_environment([1]), launch('xpu').ray_resource)"
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "listed": (LISTED, {}),
    "default": ("import rlcore; print(rlcore.get_device().name)", {"RLCORE_DISABLE_PLUGINS": "cuda"}),
    "facts": (FACTS, {"HIP_VISIBLE_DEVICES": "4,6"}),
    **{build: (TOLD_APART.format(build=build), {}) for build in ("hip", "cuda")},
}


@pytest.mark.skipif(torch.version.cuda is not None or torch.xpu.is_available(), reason="for a CPU build of torch")
def test_each_is_listed_as_not_available_with_its_reason(printed: dict[str, str]) -> None:
    found = json.loads(printed["listed"])
    none = "there is none, it is hidden, its driver is missing, or torch is not built for it"
    assert found.pop("cpu") == ["host", ""]
    assert found.pop("cuda")[0] == "NVIDIA"
    assert found.pop("npu")[0] == "Huawei"
    assert found == {
        "rocm": ["AMD", f"torch {torch.__version__} is no build for it: torch.version.hip is None"],
        "xpu": ["Intel", f"torch.xpu counts no device: {none}"],
        "musa": [
            "Moore Threads",
            f"torch {torch.__version__} has no device type 'musa'; install the vendor's extension of torch, "
            "or a torch that is built for it",
        ],
        "mps": ["Apple", f"torch.mps counts no device: {none}"],
    }


def test_the_default_device_stays_what_is_there(printed: dict[str, str]) -> None:
    assert printed["default"] == "cpu:0\n"


def test_launch_facts_are_there_without_the_device(printed: dict[str, str]) -> None:
    assert printed["facts"] == "{'HIP_VISIBLE_DEVICES': '6'} GPU\n"


@pytest.mark.parametrize("build", ["hip", "cuda"])
def test_vendors_that_share_a_torch_type_are_told_apart(printed: dict[str, str], build: str) -> None:
    name = {"hip": "rocm", "cuda": "cuda"}[build]
    assert printed[build] == f"['cpu', '{name}']\n{name}:0 cuda:0 nccl\n{name}:2 cuda:2 nccl\n"
