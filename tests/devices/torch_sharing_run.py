"""Torch's reduction of tensors between processes, in a process of its own: exports, and two importers, one twice.

Run as ``torch_sharing_run.py DEVICE``; prints what came of it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import torch

from rlcore.devices.declared import sharing
from rlcore.devices.ipc.tensors import TensorIpc
from rlcore.registry import get_device
from rlcore.types import IpcHandle


def shared(name: str) -> Any:
    """The device, whose memory is shared as a declared one's."""
    device: Any = get_device(name)
    if device.type == "npu":  # torch_npu has the count's function under a name of its own
        typed: Any = torch.TypedStorage
        sharing.release_ipc_counter = lambda handle, offset: typed._release_ipc_counter_npu(
            handle, offset, device=device.index
        )
    device.memory._ipc = TensorIpc(device, sharing.TorchSharing(device))
    return device


def imported(name: str, handle: str) -> list[float]:
    """Return what an importer reads; it writes what the exporter sees then."""
    device, found = shared(name), []
    for _ in range(2):
        mapping = device.memory.import_ipc(IpcHandle.from_bytes(bytes.fromhex(handle)))
        found.append(mapping.tensor.double().sum().item())
        mapping.tensor[0] += 1
        device.synchronize()
        mapping.close()
    return found


def exported(name: str) -> dict[str, Any]:
    device = shared(name)
    before = device.memory.stats().allocated_bytes
    tensor = torch.arange(1024.0, device=device.torch_device)[24:]
    expected = tensor.double().sum().item()
    device.synchronize()
    handle = device.memory.export_ipc(tensor)
    told = handle.to_bytes().hex()
    reads = []
    for _ in range(2):
        done = subprocess.run([sys.executable, __file__, name, told], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        reads += json.loads(done.stdout.splitlines()[-1])
    first = tensor[0].item()
    device.memory.revoke(handle)
    del tensor
    gc.collect()
    return {
        "read": [value - expected for value in reads],
        "written": first,
        "left": device.memory.stats().allocated_bytes - before,
        "ledger": len(device.memory.ledger()),
    }


if __name__ == "__main__":
    print(json.dumps(imported(*sys.argv[1:]) if len(sys.argv) > 2 else exported(sys.argv[1])))
