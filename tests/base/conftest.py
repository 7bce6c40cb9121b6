"""Third-party plugins as real distributions: a module, metadata and an entry point in a folder on the path.

And flash-attn-4, which runs on GPUs alone, as if it were installed and ran here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.base.flash_4_stand_in import FlashAttention4, modules_of
from tests.warm import run_warm

HEADER = """
from rlcore import DeviceSpec, hookimpl
from rlcore.types import Probe

def spec(name, loader, **changes):
    fields = dict(name=name, vendor="Acme", torch_type="cpu", priority=50, loader=loader,
                  collective_backend="gloo", api_version=(1, 0))
    return DeviceSpec(**fields | changes)
"""

GOOD = """
@hookimpl
def rlcore_register_devices(register):
    register(spec("good", f"{__name__}:Device"))

class Device:
    @staticmethod
    def probe(spec):
        return Probe(2)

    def __init__(self, spec, index):
        self.name = f"{spec.name}:{index}"
"""


class Site:
    """A folder of installed plugins, and Python processes that see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, code: str, *, distribution: str | None = None) -> None:
        """Distribution ``acme-<name>`` 1.2 with the entry point ``name``."""
        distribution = distribution or f"acme-{name}"
        module = distribution.replace("-", "_")
        (self.folder / f"{module}.py").write_text(HEADER + textwrap.dedent(code))
        info = self.folder / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[rlcore]\n{name} = {module}\n")

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        # No GPU is visible, so that the outcome does not depend on the machine.
        defaults = {"PYTHONPATH": str(self.folder), "CUDA_VISIBLE_DEVICES": ""}
        return run_warm(textwrap.dedent(code), env=defaults | env)

    def registered(self, **env: str) -> dict[str, Any]:
        """What a new process has registered: names of devices, failed plugins by name, and its log."""
        result = self.run(_DUMP, **env)
        assert result.returncode == 0, result.stderr
        return {**json.loads(result.stdout), "log": result.stderr}


_DUMP = """
    import json
    from rlcore.registry import registry
    fields = ("name", "distribution", "version", "stage", "reason")
    failed = {r.name: {field: getattr(r, field) for field in fields} for r in registry().plugins if r.error}
    print(json.dumps({"devices": list(registry().devices), "failed": failed}))
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return site_with_good_plugin(tmp_path)


def site_with_good_plugin(folder: Path) -> Site:
    site = Site(folder)
    site.install("good", GOOD)
    return site


@pytest.fixture
def flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> FlashAttention4:
    made = FlashAttention4()
    for name, module in modules_of(made).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(pytest.importorskip("rlcore.packed.choice")._INSTALLED, 4, lambda: True)
    return made
