"""A virtual environment whose ``triton`` is triton-ascend; all else is that of the interpreter which makes it.

python tests/devices/ascend/triton_environment.py FOLDER

The wheel has the compiler as far as linalg IR, so that neither CANN nor an NPU is needed. It overwrites Triton's files,
which is why it has an environment of its own.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = ("triton-ascend==3.2.0", "pybind11>=3")
"""triton-ascend imports pybind11 without saying so."""


def make(folder: Path) -> Path:
    """The environment's python.

    Raises:
        RuntimeError: a package cannot be installed; says which and why.
    """
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!a})" for path in parents]
    (packages / "parents.pth").write_text("\n".join(lines) + "\n")
    target = ["--target", str(packages), "--upgrade", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *target, *REQUIREMENTS]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(REQUIREMENTS)} cannot be installed: {found.stderr.strip().splitlines()[-1]}")
    (folder / "complete").touch()
    return python


if __name__ == "__main__":
    print(make(Path(sys.argv[1]).resolve()))
