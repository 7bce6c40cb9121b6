"""Vendors that torch carries need a DeviceSpec and no code: tests/plugins/other_vendors, as an installed distribution.

This machine has none of their devices. What is proven is that they are listed with a clear reason, get nobody's place,
and have their launch facts; and, with stand-ins for what torch would say there, which of two vendors that share torch's
device type "cuda" a machine has.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

PLUGIN = Path(__file__).parent.parent / "plugins" / "other_vendors"


@pytest.fixture
def vendors(tmp_path: Path, run_python: Any) -> Any:
    """Runs Python where the plugin is installed: as its pyproject.toml says, without building it."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["rlcore"].values()
    shutil.copy(PLUGIN / f"{module}.py", tmp_path)
    info = tmp_path / f"{module}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = "\n".join(f"{name} = {path}" for name, path in project["entry-points"]["rlcore"].items())
    (info / "entry_points.txt").write_text(f"[rlcore]\n{entries}\n")

    def run(code: str, **env: str) -> str:
        result = run_python(code, env={"PYTHONPATH": str(tmp_path), "RLCORE_STRICT_PLUGINS": "1", **env})
        assert result.returncode == 0, result.stderr
        printed: str = result.stdout
        return printed

    return run


@pytest.mark.skipif(torch.version.cuda is not None or torch.xpu.is_available(), reason="for a CPU build of torch")
def test_each_is_listed_as_not_available_with_its_reason(vendors: Any) -> None:
    code = "import json, rlcore; print(json.dumps({i.name: [i.vendor, i.reason] for i in rlcore.list_devices()}))"
    found = json.loads(vendors(code))
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


def test_the_default_device_stays_what_is_there(vendors: Any) -> None:
    assert vendors("import rlcore; print(rlcore.get_device().name)", RLCORE_DISABLE_PLUGINS="cuda") == "cpu:0\n"


def test_launch_facts_are_there_without_the_device(vendors: Any) -> None:
    code = (
        "from rlcore.registry import launch; print(launch('rocm').worker_environment([1]), launch('xpu').ray_resource)"
    )
    assert vendors(code, HIP_VISIBLE_DEVICES="4,6") == "{'HIP_VISIBLE_DEVICES': '6'} GPU\n"


@pytest.mark.parametrize("build", ["hip", "cuda"])
def test_vendors_that_share_a_torch_type_are_told_apart(vendors: Any, build: str) -> None:
    # Stand-ins for what a ROCm or CUDA build says on its machine; no device is used.
    code = f"""
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
    name = {"hip": "rocm", "cuda": "cuda"}[build]
    assert vendors(code) == f"['cpu', '{name}']\n{name}:0 cuda:0 nccl\n{name}:2 cuda:2 nccl\n"
