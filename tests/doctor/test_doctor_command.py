"""``rlcore doctor`` as a whole, as its users run it: on this machine, and on machines where something is broken.

Broken machines are made of real distributions in a folder on the path: plugins, a torch back end, another torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from rlcore.plugins import BUILT_IN
from tests.warm import LIMIT_S, without_settings

SECRET = "hf_abcdefghijklmnop"
PASSWORD = "pa55word"


class Machine:
    """Runs ``rlcore doctor --json`` with ``folder`` at the front of the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, code: str, entry_point: str) -> None:
        """Distribution ``acme-<name>`` with one module; ``entry_point`` is "group/name"."""
        (self.folder / f"acme_{name}.py").write_text(textwrap.dedent(code))
        info = self.folder / f"acme_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.2\n")
        group, _, entry = entry_point.partition("/")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry} = acme_{name}\n")

    def metadata(self, name: str, version: str) -> None:
        """A distribution of which nothing but the metadata is there."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def plugin(self, name: str, probe: str, body: str = "") -> None:
        """A plugin with one device, whose probe is ``probe``."""
        code = f"""
            from rlcore import DeviceSpec, hookimpl
            from rlcore.types import Capability, Probe
            {body}

            @hookimpl
            def rlcore_register_devices(register):
                register(DeviceSpec(name="{name}", vendor="Acme", torch_type="cpu", priority=50,
                                    loader="acme_{name}:Device", collective_backend="gloo", api_version=(1, 0)))

            class Device:
                def __init__(self, spec, index):
                    self.name = f"{{spec.name}}:{{index}}"

                @staticmethod
                def probe(spec):
                    {probe}

                def capabilities(self):
                    return {{"memory.export_ipc": Capability("unsupported", "declared", "it has no memory")}}
        """
        self.install(name, code, f"rlcore/{name}")

    def run(self, *arguments: str, **env: str) -> Any:
        defaults = {
            "PYTHONPATH": str(self.folder),
            "CUDA_VISIBLE_DEVICES": "",
            "RLCORE_RUNTIME": str(self.folder / "run"),
            "RLCORE_PROBE_TIMEOUT_S": "120",  # checks of devices have so much longer, on a busy machine
        }
        command = [sys.executable, "-m", "rlcore", "doctor", *arguments]
        everything = without_settings() | defaults | env
        return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def report(self, code: int = 0, **env: str) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
        result = self.run("--json", **env)
        assert result.returncode == code, result.stdout + result.stderr
        report = json.loads(result.stdout)
        return report, {check["check"]: check for check in report["checks"]}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_sound_machine_whose_gpus_are_hidden_warns_and_exits_with_0(machine: Machine) -> None:
    start = time.perf_counter()
    report, checks = machine.report(CUDA_VISIBLE_DEVICES="-1")
    seconds = time.perf_counter() - start
    assert report["schema"] == "rlcore.doctor/1"
    assert report["seconds"] < seconds
    assert {"python", "path of torch", "torch", "torch-npu", "CANN", "NPU driver", "triton", "vllm", "vllm-ascend",
            "sglang", "flash-attn", "driver", "ptxas", "nvcc",
            "peer access", "shared memory", "locked memory", "open files", "leftovers", "allocator", "environment",
            "import torch", "plugins", "operators",
            "device cpu", "device cuda", "default device", "visible cuda", "ipc cpu"} <= set(checks)  # fmt: skip
    assert all(check["status"] in ("OK", "WARN") for check in checks.values())
    assert checks["default device"]["found"] == "cpu:0"
    assert checks["ipc cpu"]["found"].startswith("another process opened it in ")
    assert checks["plugins"]["found"] == "; ".join(BUILT_IN)
    assert report["status"] == "WARN"
    assert checks["visible cuda"] == {
        "check": "visible cuda",
        "status": "WARN",
        "found": "CUDA_VISIBLE_DEVICES='-1' hides every cuda device",
        "fix": "unset CUDA_VISIBLE_DEVICES, if that is not meant",
    }
    documented = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    names = {re.sub("^(device|visible|ipc) .*", r"\1 NAME", name) for name in checks}
    assert [name for name in names if f"`{name}`" not in documented] == []


@pytest.mark.slow
def test_the_table_says_the_same(machine: Machine) -> None:
    result = machine.run(CUDA_VISIBLE_DEVICES="0,,1")
    assert result.returncode == 0
    lines = {line.partition("  ")[0]: line for line in result.stdout.splitlines()}
    assert " OK " in lines["device cpu"]
    assert "another process opened it in" in lines["ipc cpu"]
    assert re.search(
        r" WARN +CUDA_VISIBLE_DEVICES='0,,1' ends at '', .* export CUDA_VISIBLE_DEVICES=0", lines["visible cuda"]
    )


@pytest.mark.slow
def test_secrets_are_never_printed(machine: Machine) -> None:
    # The plugin repeats what it should not: the error is shown, what it holds is not.
    proxy = f"http://someone:{PASSWORD}@proxy:3128"
    machine.plugin(
        "leaky", "import os; raise OSError('no route by ' + os.environ['HTTPS_PROXY'] + os.environ['HF_TOKEN'])"
    )
    machine.install(
        "loose", "import os; print(os.environ['HF_TOKEN']); raise OSError('ftp://me:pa55word@x')", "rlcore/loose"
    )
    env = {"HF_TOKEN": SECRET, "HTTPS_PROXY": proxy, "WANDB_API_KEY": "0123456789abcdef", "OMP_NUM_THREADS": "1"}
    for arguments in ((), ("--json",)):
        result = machine.run(*arguments, **env)
        assert result.returncode == 1
        text = result.stdout + result.stderr
        assert "OSError: no route by <HTTPS_PROXY><HF_TOKEN>" in text
        assert "OSError: ftp://<credentials>@x" in text
        assert [value for value in (SECRET, PASSWORD, "0123456789abcdef", "someone") if value in text] == []
        assert "OMP_NUM_THREADS=1" in text


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The report of a machine on which much is wrong."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.plugin("fine", "return Probe(3)")
    machine.plugin("absent", "return Probe(0, 'no card')")
    machine.plugin("sick", "raise OSError('driver too old')")
    machine.plugin("quitter", "raise SystemExit('no licence')")
    machine.plugin("stuck", "import time; time.sleep(600)")
    machine.plugin("mute", "return Probe(1)", "Capability = lambda *_: 'yes'")
    machine.install("broken", "import acme_runtime", "rlcore/broken")
    machine.install("second", "raise OSError('it is broken')", "rlcore/second")
    machine.metadata("triton-ascend", "3.2.0")
    machine.metadata("triton", "3.7.0")
    return machine.report(1, RLCORE_PROBE_TIMEOUT_S="10", RLCORE_STRICT_PLUGINS="1", RLCORE_DEVICE="cuda")


@pytest.mark.slow
def test_devices_of_plugins_are_checked(wrong: Any) -> None:
    report, checks = wrong
    assert report["status"] == "FAIL"
    assert checks["device fine"]["found"] == "3 of Acme; members: 1 unsupported; evidence: declared"
    assert checks["ipc fine"]["found"] == "not supported: it has no memory"
    assert (checks["device absent"]["status"], checks["device absent"]["found"]) == ("OK", "not available: no card")
    failed = {name: check for name, check in checks.items() if check["status"] == "FAIL"}
    assert {name: check["found"] for name, check in failed.items() if name.startswith("device")} == {
        "device sick": "its probe failed: OSError: driver too old",
        "device quitter": "its probe failed: SystemExit: no licence",
        "device stuck": "its probe failed: TimeoutError: it did not end within 10 s",
        "device mute": "capabilities() answered with no Capability for memory.export_ipc",
    }
    assert failed["device sick"]["fix"] == "pip install --upgrade acme-sick, or RLCORE_DISABLE_PLUGINS=sick"
    assert checks["ipc cpu"]["status"] == "OK"


@pytest.mark.slow
def test_strict_does_not_hide_the_second_broken_plugin(wrong: Any) -> None:
    found = {name: check["found"] for name, check in wrong[1].items() if name.startswith("plugin ")}
    assert found == {
        "plugin broken": "broken of acme-broken 1.2 failed at stage import: ModuleNotFoundError: "
        "No module named 'acme_runtime'",
        "plugin second": "second of acme-second 1.2 failed at stage import: OSError: it is broken",
    }


@pytest.mark.slow
def test_a_wrong_default_device_and_two_tritons_fail(wrong: Any) -> None:
    _, checks = wrong
    assert checks["default device"]["status"] == checks["triton"]["status"] == "FAIL"
    assert checks["default device"]["found"].startswith("RLCORE_DEVICE=cuda: device 'cuda' is not available here: ")
    found = "triton 3.7.0, triton-ascend 3.2.0: one has overwritten files of the other"
    assert checks["triton"]["found"] == found


@pytest.mark.slow
def test_a_plugin_that_crashes_the_process_is_a_finding(machine: Machine) -> None:
    machine.plugin("violent", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    _, checks = machine.report(1)
    assert checks["device cuda"]["status"] == "OK"
    found = "the process of this check was ended by SIGSEGV; nothing after it was checked"
    assert (checks["device violent"]["status"], checks["device violent"]["found"]) == ("FAIL", found)
    assert "RLCORE_DISABLE_PLUGINS=all rlcore doctor" in checks["device violent"]["fix"]
    assert checks["shared memory"]["status"] in ("OK", "WARN")


# ----------------------------------------------------------------------------- when torch cannot be imported


@pytest.mark.slow
def test_a_back_end_that_breaks_torch_is_named_in_one_line_however_long(machine: Machine) -> None:
    # As the wheel of torch-npu does on a machine without CANN.
    told = f"libhccl.so: cannot open shared object file {'x' * 900}"
    machine.install("npu", f"raise ImportError({told!r})", "torch.backends/acme_npu")
    report, checks = machine.report(1)
    assert report["status"] == "FAIL"
    found = checks["import torch"]
    assert found["status"] == "FAIL"
    assert "RuntimeError: Failed to load the backend extension: acme_npu" in found["found"]
    assert f"ImportError: {told}" in found["found"]
    assert "torch alone works" in found["fix"]
    assert "pip uninstall acme-npu; meanwhile export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["fix"]
    assert checks["torch"]["found"].partition(",")[0]  # its version is known without importing it
    header, *lines = machine.run().stdout.splitlines()
    assert re.fullmatch(r"check +found  what to do", header)
    assert [line.partition("  ")[0] for line in lines] == list(checks)
    (line,) = [line for line in lines if line.startswith("import torch ")]
    assert re.split(" {2,}", line) == ["import torch", "FAIL", found["found"], found["fix"]]
    assert [line for line in lines if "   " in line.partition("  ")[2].strip().partition("  ")[2].strip()] == []
    assert max(len(line) for line in lines if "x" * 900 not in line) < 900
    assert machine.report(TORCH_DEVICE_BACKEND_AUTOLOAD="0")[1]["import torch"]["status"] == "OK"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("raise ImportError('libtorch.so: no symbol')", "failed: ImportError: libtorch.so: no symbol"),
        pytest.param(
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV", marks=pytest.mark.slow
        ),
    ],
)
def test_a_torch_that_is_broken_itself(machine: Machine, code: str, found: str) -> None:
    (machine.folder / "torch").mkdir()
    (machine.folder / "torch" / "__init__.py").write_text(code)
    (machine.folder / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n")
    _, checks = machine.report(1)
    assert checks["torch"]["found"] == "2.13.0, CUDA 13.0"
    assert checks["import torch"]["found"] == f"it {found}. No device was checked"
    assert checks["import torch"]["fix"] == "pip install --force-reinstall torch"


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(None, id="absent"),
        pytest.param("", id="empty", marks=pytest.mark.slow),
        pytest.param("__version__ = ", id="cut short", marks=pytest.mark.slow),
    ],
)
def test_a_torch_that_is_installed_by_half(machine: Machine, version: str | None) -> None:
    (machine.folder / "torch").mkdir()
    (machine.folder / "torch" / "__init__.py").write_text("from torch.version import __version__")
    if version is not None:
        (machine.folder / "torch" / "version.py").write_text(version)
    report, checks = machine.report(1)
    assert report["status"] == checks["torch"]["status"] == checks["import torch"]["status"] == "FAIL"
    file = machine.folder / "torch" / "version.py"
    assert checks["torch"]["found"] == f"installed by half: {file} is missing, or does not say its version"
    assert checks["torch"]["fix"] == "pip install --force-reinstall torch"


@pytest.mark.slow
def test_an_interrupt_leaves_no_process(machine: Machine, tmp_path: Path) -> None:
    machine.plugin(
        "stuck",
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); __import__('time').sleep(600)",
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path), "RLCORE_RUNTIME": str(tmp_path / "run")}
    with subprocess.Popen(
        [sys.executable, "-m", "rlcore", "doctor"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.slow
def test_a_plugin_that_hangs_at_its_import_is_named_and_all_else_is_checked(machine: Machine) -> None:
    machine.install("stuck", "import time; time.sleep(600)", "rlcore/stuck")
    _, checks = machine.report(1, RLCORE_PROBE_TIMEOUT_S="12")  # more than a check has
    late = "TimeoutError: it did not end within 12 s"
    assert checks["plugin stuck"]["found"] == f"stuck of acme-stuck 1.2 failed at stage import: {late}"
    assert checks["plugin stuck"]["fix"] == "pip install --upgrade acme-stuck, or RLCORE_DISABLE_PLUGINS=stuck"
    assert {checks[name]["status"] for name in ("device cpu", "default device", "ipc cpu", "operators")} == {"OK"}
