"""Devices that torch carries and nobody has run: what they say of themselves, and that they give way to plugins.

This machine has none of them. What is tested is torch's own Python surface, which every build of torch has, and, with
stand-ins for what torch would say there, how they are chosen.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.device import Device
from rlcore.devices.declared.plugin import SPECS
from rlcore.registry import registry, resolve
from tests.base.conftest import Site
from tests.conftest import ROOT
from tests.warm import run_warm

NAMES = [spec.name for spec in SPECS]
NONE_HERE = f"declared: torch {torch.__version__} has no such back end here; install one that is built for it"
LIST = """
import json, rlcore
print(json.dumps({i.name: [i.plugin, i.is_available, i.reason] for i in rlcore.list_devices()}))
"""
# Stand-ins for what a build of torch for the device says on its machine; no device is used.
ON_ITS_MACHINE = """
import torch
torch.version.cuda, torch.version.hip = {cuda!r}, {hip!r}
torch.accelerator.current_accelerator = lambda: torch.device("{type}")
torch.{type}.device_count = lambda: 2
import rlcore
print(rlcore.get_device().name, rlcore.get_device(torch.device("{type}:1")).name, rlcore.get_device().evidence)
"""
VENDORS = """
@hookimpl
def rlcore_register_devices(register):
    register(spec("xpu", f"{__name__}:Device", vendor="Intel itself", priority=0))

class Device:
    @staticmethod
    def probe(spec):
        return Probe(1)
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def listed(site: Site, **environment: str) -> dict[str, Any]:
    found = site.run(LIST, **environment)
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


def made(name: str) -> Device:
    """One as it is described, of which nothing is called that needs the hardware."""
    (spec,) = (spec for spec in SPECS if spec.name == name)
    device: Device = resolve(spec.loader)(spec, 0)
    return device


@pytest.mark.skipif(
    (torch.accelerator.current_accelerator() or torch.device("cuda")).type != "cuda" or torch.version.hip is not None,
    reason="for a build of torch for CUDA or for the CPU alone",
)
def test_each_is_listed_last_with_the_reason_and_changes_nothing_else(site: Site) -> None:
    found = listed(site)
    assert [name for name, (plugin, *_) in found.items() if plugin == "declared"] == list(found)[-len(NAMES) :] == NAMES
    assert all(found[name] == ["declared", False, NONE_HERE] for name in NAMES)
    assert set(registry().devices) >= {"cpu", "cuda", "npu"} and not set(registry().devices) & set(NAMES)
    assert not set(listed(site, RLCORE_DISABLE_PLUGINS="declared")) & set(NAMES)


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_one_that_torch_lacks_is_refused_with_the_reason(site: Site, name: str) -> None:
    found = site.run(f"import rlcore; rlcore.get_device({name!r})")
    assert f"DeviceError: device '{name}' is not available here: {NONE_HERE}." in found.stderr


@pytest.mark.parametrize(
    ("build", "found"),
    [
        ({"type": "cuda", "cuda": None, "hip": "7.0"}, "rocm:0 rocm:1 declared\n"),
        ({"type": "cuda", "cuda": "13.0", "hip": None}, "cuda:0 cuda:1 hardware\n"),
        ({"type": "xpu", "cuda": None, "hip": None}, "xpu:0 xpu:1 declared\n"),
        ({"type": "mps", "cuda": None, "hip": None}, "mps:0 mps:1 declared\n"),
    ],
)
def test_the_one_for_which_torch_is_built_is_found(build: dict[str, Any], found: str) -> None:
    done = run_warm(ON_ITS_MACHINE.format(**build))
    assert done.stdout == found, done.stderr


def test_a_vendors_plugin_takes_the_place_of_its_name(site: Site) -> None:
    site.install("intel", VENDORS)
    assert listed(site)["xpu"] == ["intel", True, ""]


def test_none_stands_in_for_a_plugin_that_failed_or_is_disabled(site: Site) -> None:
    site.install("musa", VENDORS.replace('"xpu"', '"musa"'))
    site.install("apple", VENDORS.replace('"xpu"', '"mps"').replace("\n\nclass", "\n    register(None)\n\nclass"))
    site.install("rocm", "raise RuntimeError('no library')")
    found = listed(site, RLCORE_DISABLE_PLUGINS="musa")
    assert list(found) == ["cpu", "cuda", "npu", "xpu"]
    for name, reason in (
        ("mps", "its plugin failed: PluginError: register() takes a DeviceSpec"),
        ("rocm", "its plugin failed: RuntimeError: no library"),
        ("musa", "RLCORE_DISABLE_PLUGINS names its plugin"),
    ):
        refused = site.run(f"import rlcore; rlcore.get_device({name!r})", RLCORE_DISABLE_PLUGINS="musa").stderr
        assert f"DeviceError: device '{name}' is missing because {reason}" in refused


# ------------------------------------------------------------------------------ the surface that torch has

_IPC = {"memory.export_ipc", "memory.import_ipc", "memory.revoke", "memory.ledger"}
_EVENTS = {"streams.export_event", "streams.import_event"}
_RANDOM = {"identity.seed", "identity.rng_state", "identity.set_rng_state"}
UNSUPPORTED = {
    "rocm": _EVENTS,
    "xpu": _IPC | _EVENTS,
    "mps": _IPC | _EVENTS | _RANDOM | {"memory.pool", "identity.properties"},
}
"""The capabilities that each declared device lacks, by the Python modules of torch alone."""
MAY_LACK = {
    "xpu": {"memory.pool"},
    "mps": {"memory.info", "memory.stats", "memory.reset_peak", "memory.empty_cache"},
}
"""Not every supported torch has pools of XPU, or an allocator of MPS behind ``torch.accelerator``."""
OF_MUSA = "device_count get_device_properties mem_get_info MemPool use_mem_pool Stream Event"
"""The functions and classes of torch_musa that rlcore uses; test_generic_device.py has those of torch's modules."""


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_a_declared_device_cannot_do_follows_from_torch(name: str) -> None:
    found = made(name).capabilities()
    assert {how.evidence for how in found.values()} == {"declared"}
    lacks = {member for member, how in found.items() if how.support == "unsupported"}
    assert lacks - MAY_LACK.get(name, set()) == UNSUPPORTED[name]


def test_torch_musa_has_what_a_declared_device_calls() -> None:
    try:
        module: Any = importlib.import_module("torch_musa")
    except ImportError:
        pytest.skip(
            "torch_musa cannot be installed: no index has it, and 2.7.1, its newest source, is for torch 2.7.1; rlcore "
            "needs 2.10"
        )
    assert [one for one in OF_MUSA.split() if not hasattr(module, one)] == []


def test_the_page_names_what_each_lacks() -> None:
    rows = re.findall(r"^\| `(\w+)` +\|(.*)\|$", (ROOT / "docs" / "bring_up.md").read_text(), re.MULTILINE)
    told = {name: row for name, row in rows if name in NAMES}
    assert list(told) == NAMES
    for name, members in UNSUPPORTED.items():
        for member in members - _IPC - _EVENTS:
            assert f"`{member}`" in told[name]
