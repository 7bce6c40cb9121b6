"""IPC by torch's own reduction of tensors, as declared ROCm devices have it.

There is no such device here. Tested are the form of what torch gives, of whichever torch runs this, and the whole way
of a tensor between processes where that form is: over the simulated CANN, whose torch_npu has it, and on CUDA devices.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.multiprocessing import reductions

from rlcore.devices.declared import sharing
from rlcore.devices.declared.sharing import FIELDS, TorchSharing
from rlcore.devices.generic import GenericTorchDevice
from rlcore.devices.ipc.sharing import SharedMemory
from rlcore.errors import DeviceError, UnsupportedError
from rlcore.types import DeviceProperties, DeviceSpec
from tests.devices.ascend.conftest import _simulated, run_simulated, run_simulated_in  # noqa: F401
from tests.warm import LIMIT_S

RUN = Path(__file__).with_name("torch_sharing_run.py")


def test_torch_opens_a_tensor_of_another_process_by_these_arguments() -> None:
    opens: Any = reductions.rebuild_cuda_tensor
    assert tuple(inspect.signature(opens).parameters) == FIELDS


def test_torch_has_plain_handles_of_cuda_memory_alone() -> None:
    """So that XPU and MPS have no IPC. A torch that has more fails here, and they can have it."""
    reduces: Any = reductions.reduce_tensor
    assert set(re.findall(r'device\.type == "(\w+)"', inspect.getsource(reduces))) == {"cuda", "meta"}


class Chip(GenericTorchDevice):
    """The processor, with a uuid: what torch gives for its memory is no plain handle."""

    uuid = "one"

    def properties(self) -> DeviceProperties:
        return DeviceProperties("chip", self.uuid, 0, "", 0)


def chip() -> Chip:
    names = {"name": "chip", "vendor": "nobody", "torch_type": "cpu", "collective_backend": "gloo"}
    return Chip(DeviceSpec(**names, priority=1, loader="a:b", api_version=(1, 0)), 0)  # type: ignore[arg-type]


@pytest.fixture
def of_the_processor(monkeypatch: pytest.MonkeyPatch) -> TorchSharing:
    from contextlib import nullcontext

    monkeypatch.setattr(torch.cpu, "device", lambda index: nullcontext(), raising=False)
    return TorchSharing(chip())


def test_what_torch_would_have_to_pickle_is_refused(of_the_processor: TorchSharing) -> None:
    reason = rf"torch {re.escape(torch.__version__)} hands over no plain handle of cpu"
    with pytest.raises(UnsupportedError, match=reason):
        of_the_processor.share(torch.ones(4).untyped_storage())


def test_memory_of_another_device_and_other_bytes_are_refused(of_the_processor: TorchSharing) -> None:
    with pytest.raises(DeviceError, match="bytes are no payload of chip memory"):
        of_the_processor.open(SharedMemory(b"\x80\x03."), 4)
    elsewhere = msgspec.msgpack.encode(sharing._Payload("two", b"key", 4, 0, b"", False))
    with pytest.raises(DeviceError, match="this memory is of the device two; chip:0 is one"):
        of_the_processor.open(SharedMemory(elsewhere), 4)


def test_a_device_without_uuid_shares_nothing(of_the_processor: TorchSharing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chip, "uuid", "")
    with pytest.raises(UnsupportedError, match=r"IPC on chip:0 .*torch tells no uuid"):
        of_the_processor.open(SharedMemory(msgspec.msgpack.encode(sharing._Payload("", b"", 4, 0, b"", False))), 4)


def check(printed: str) -> None:
    """Each importer has read and written the exporter's memory twice, and nothing of it is left."""
    found = json.loads(printed.splitlines()[-1])
    assert found == {"read": [0.0, 1.0, 2.0, 3.0], "written": 28.0, "left": 0, "ledger": 0}


@pytest.mark.slow
def test_a_tensor_is_shared_over_the_simulated_cann(run_simulated: Any) -> None:  # noqa: F811
    done = run_simulated(str(RUN), "npu:0")
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.gpu
def test_a_tensor_is_shared_on_a_gpu() -> None:
    done = subprocess.run([sys.executable, RUN, "cuda:0"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    check(done.stdout)
