"""Checks of NVIDIA's driver and of the paths between GPUs, through NVML: CUDA is not initialised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlcore.devices.cuda.nvml import Nvml
from rlcore.doctor.check import CheckVerdict, fail, ok, warn
from rlcore.doctor.packages import TorchBuild
from rlcore.errors import DeviceError, MissingDependencyError

DRIVER = Path("/proc/driver/nvidia/version")


def driver(build: TorchBuild | None, path: Path = DRIVER) -> CheckVerdict:
    """Check the driver against the CUDA version of the torch build."""

    def judge(nvml: Nvml) -> CheckVerdict:
        version, newest = nvml.driver_version(), nvml.cuda_version()
        return _suits(build, f"{version}, for CUDA {newest[0]}.{newest[1]} and before", newest[0])

    return _asked(path, judge)


def _suits(build: TorchBuild | None, found: str, newest_major: int) -> CheckVerdict:
    """Compare major versions: a driver runs builds for its own major version of CUDA, and for older ones."""
    if build is None:
        return ok(found)
    if build.cuda is None:
        return warn(f"{found}; torch is {build.kind}", "pip install --force-reinstall torch (a CUDA build)")
    if int(build.cuda.partition(".")[0]) > newest_major:
        return fail(
            f"{found}; torch has CUDA {build.cuda}", f"update the driver, or use a torch for CUDA {newest_major}"
        )
    return ok(f"{found}; torch has CUDA {build.cuda}")


def peer_access(path: Path = DRIVER) -> CheckVerdict:
    """Check which GPUs can access each other's memory without the host."""
    return _asked(path, _paths)


def _paths(nvml: Nvml) -> CheckVerdict:
    gpus, links = nvml.gpus(), nvml.links()
    if not links:
        return ok(f"{len(gpus)} GPU")
    apart = [f"{link.first}-{link.second}" for link in links if not link.has_peer_access]
    num_nvlink = sum(link.has_nvlink for link in links)
    found = f"{len(gpus)} GPUs, {len(links)} pairs, {num_nvlink} by NVLink"
    if not apart:
        return ok(f"{found}; each reaches the other's memory")
    return warn(
        f"{found}; no peer access between {', '.join(apart)}: weights go through the host there",
        "nvidia-smi topo -p2p r; on PCIe, IOMMU and ACS of the host prevent it",
    )


def _asked(path: Path, judge: Callable[[Nvml], CheckVerdict]) -> CheckVerdict:
    """Return what ``judge`` finds through NVML, or why it could not ask."""
    if not path.exists():
        return ok("no NVIDIA driver on this machine")
    try:
        with Nvml() as nvml:
            return judge(nvml)
    except DeviceError as error:
        return fail(str(error), "nvidia-smi; if that fails too, reboot, or install the driver again")
    except MissingDependencyError as error:
        return warn(f"{path.read_text().splitlines()[0]}; {error}", "pip install 'rlcore[cuda]'")
