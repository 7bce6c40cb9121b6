"""The examples of docs/devices.md do what their comments say; those of two processes have a column for each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import UnsupportedError

from .conftest import Peer

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
POOL, BUFFER, SHARED, STREAMS, EVENT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MB = 2**20


def columns(example: str) -> list[tuple[str, str]]:
    """(exporter's, importer's) line by line."""
    first, *lines = example.splitlines()
    right = first.index("# importer")
    return [(line[:right].strip(), line[right:].strip()) for line in lines]


def test_memory(device: Any) -> None:
    names: dict[str, Any] = {"rlcore": rlcore, "module": torch.nn.Linear(512, 512)}
    code = POOL.replace('"cuda"', repr(device.name))
    if "pool" in device.memory.limits():
        with pytest.raises(UnsupportedError, match="pool"):
            exec(code, names)
    else:
        exec(code, names)
        assert names["pool"].stats().allocated_bytes >= MB


def test_host_buffers(device: Any) -> None:
    names: dict[str, Any] = {"memory": device.memory}
    taken, looked_at, freed = BUFFER.replace("8 << 30", str(MB + 1)).splitlines()
    exec(taken, names)
    assert eval(looked_at, names).shape == (MB + 1,)
    exec(freed, names)


def test_memory_of_other_processes(device: Any, peer: Peer) -> None:
    tensor = torch.arange(6.0, device=device.torch_device)
    device.synchronize()
    names = {"device": device, "tensor": tensor}
    mine, theirs = zip(*columns(SHARED), strict=True)
    exec("\n".join(mine[:2]), names)
    peer.run("from rlcore.types import IpcHandle; copy = torch.zeros(6, device=device.torch_device)")
    code = "\n".join(["data = bytes.fromhex(text)", *theirs, "result = copy.tolist()"])
    assert peer.run(code, text=names["data"].hex()) == tensor.tolist()
    exec(mine[2], names)
    assert names["handle"].export_id not in {entry.export_id for entry in device.memory.ledger()}


def test_streams(device: Any) -> None:
    tensor = torch.arange(6.0, device=device.torch_device)
    names = {"device": device, "tensor": tensor, "host": torch.zeros(6)}
    exec(STREAMS, names)
    device.synchronize()
    assert names["host"].tolist() == tensor.tolist()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_events_of_other_processes(device: Any, peer: Peer) -> None:
    names = {"device": device}
    mine, theirs = zip(*columns(EVENT), strict=True)
    exec("\n".join(mine[:2]), names)
    code = ["from rlcore.types import EventHandle", "data = bytes.fromhex(text)", *theirs[:2]]
    peer.run("\n".join(code), text=names["data"].hex())
    exec(mine[2], names)
    device.synchronize()
    assert peer.run(f"{theirs[2]}\nresult = event.query()")
