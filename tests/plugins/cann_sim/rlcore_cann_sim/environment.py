"""A virtual environment in which ``import torch`` brings the real torch_npu wheel over the simulated CANN.

python tests/plugins/cann_sim/rlcore_cann_sim/environment.py FOLDER [WHEEL]

It sees all that the interpreter has which makes it, and beside it torch-npu of torch's own minor version, from WHEEL
or from pip. Then: . FOLDER/activate; python ...
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

from build import build

ROOT = Path(__file__).resolve().parent.parent
_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: rlcore-cann-sim\nVersion: 0\n",
    "entry_points.txt": "[torch.backends]\ncann_sim = rlcore_cann_sim:take_over\n",
}


def make(folder: Path, wheel: Path | None = None) -> Path:
    """The environment's python.

    Raises:
        RuntimeError: the wheel cannot be had, or something does not build; says what.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!a})" for path in (str(ROOT), *parents)]
    (packages / "rlcore_cann_sim.pth").write_text("\n".join(lines) + "\n")
    _pip(packages, str(wheel) if wheel else f"torch-npu=={_minor()}.*")
    info = packages / "rlcore_cann_sim-0.dist-info"
    info.mkdir()
    for name, text in _INFO.items():
        (info / name).write_text(text)
    build(packages / "torch_npu", _folder_of_torch(), folder / "cann")
    _furnish(folder / "cann")
    (folder / "activate").write_text("".join(f"export {name}='{value}'\n" for name, value in variables(folder).items()))
    return python


def _furnish(cann: Path) -> None:
    """What torch_npu looks for in an installation of CANN."""
    (cann / "ascend_toolkit_install.info").write_text("version=8.5.0-simulated\n")
    for name in ("runtime", "compiler"):
        (cann / name).mkdir(exist_ok=True)


def variables(folder: Path) -> dict[str, str]:
    """What a process of the environment needs in its own."""
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(folder / "cann"),
        "ASCEND_HOME_PATH": str(folder / "cann"),
        "ASCEND_OPP_PATH": str(folder / "cann"),
        "CANN_SIM_LIBRARIES": str(folder / "cann"),
        "RLCORE_SIMULATED": "1",
        "TASK_QUEUE_ENABLE": "0",  # the simulation is synchronous
        "OMP_NUM_THREADS": "1",
    }


def _minor() -> str:
    found = re.match(r"\d+\.\d+", importlib.metadata.version("torch"))
    assert found
    return found[0]


def _folder_of_torch() -> Path:
    return Path(str(importlib.metadata.distribution("torch").locate_file("torch")))


def _pip(packages: Path, what: str) -> None:
    target = ["--target", str(packages), "--upgrade", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *target, what]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{what} cannot be installed: {found.stderr.strip().splitlines()[-1]}")


if __name__ == "__main__":
    print(make(Path(sys.argv[1]).resolve(), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
