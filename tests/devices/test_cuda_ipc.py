"""What IPC has to do with GPUs only: blocks of the allocator, memory that cannot be shared, more than one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.registry import get_device
from rlcore.types import IpcHandle

from .conftest import Peer, PeerError

pytestmark = pytest.mark.usefixtures("runtime_folder")


def exported(device: Any, tensor: torch.Tensor) -> str:
    device.synchronize()
    text: str = device.memory.export_ipc(tensor).to_bytes().hex()
    return text


@pytest.mark.gpu
def test_a_block_with_many_storages_is_opened_once(runtime_folder: object) -> None:
    device, peer = get_device("cuda"), Peer("cuda", {})
    try:
        with device.memory.pool("one block"):  # of 2 MiB, without the holes that others have left
            small = [torch.full((4,), float(number), device="cuda") for number in range(8)]
        texts = [exported(device, tensor) for tensor in small]
        assert len({IpcHandle.from_bytes(bytes.fromhex(text)).export_id for text in texts}) == 8
        assert peer.run(
            "mappings = [device.memory.import_ipc(handle_of(text)) for text in texts]\n"
            "blocks = device.memory._ipc._sharing._blocks\n"
            "result = [[block.count for block in blocks.values()], [m.tensor[0].item() for m in mappings]]",
            texts=texts,
        ) == [[8], list(range(8))]
        assert peer.run(
            "for mapping in mappings[1:]: mapping.close()\n"
            "result = [[block.count for block in blocks.values()], mappings[0].tensor.tolist()]"
        ) == [[1], [0.0] * 4]
        assert peer.run("mappings[0].close(); result = len(blocks)") == 0
    finally:
        peer.close()


@pytest.mark.gpu
def test_memory_of_a_pool_is_shared(runtime_folder: object) -> None:
    device, peer = get_device("cuda"), Peer("cuda", {})
    try:
        with device.memory.pool("shared"):
            tensor = torch.arange(8, device="cuda")
        text = exported(device, tensor)
        assert peer.run(
            "with device.memory.import_ipc(handle_of(text)) as m: result = m.tensor.tolist()", text=text
        ) == list(range(8))
    finally:
        peer.close()


@pytest.mark.gpu
def test_expandable_segments_are_refused_by_probing_the_block(runtime_folder: object) -> None:
    peer = Peer("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    try:
        peer.run("tensor = torch.ones(8, device='cuda')")
        with pytest.raises(
            PeerError, match=r"^UnsupportedError: export_ipc of this block of memory is not supported: it"
        ):
            peer.run("device.memory.export_ipc(tensor)")
    finally:
        peer.close()


@pytest.mark.gpu
def test_another_process_memory_is_not_exported_again(runtime_folder: object) -> None:
    device, peer = get_device("cuda"), Peer("cuda", {})
    try:
        text = exported(device, torch.ones(8, device="cuda"))
        peer.run("mapping = device.memory.import_ipc(handle_of(text))", text=text)
        with pytest.raises(
            PeerError, match=r"^(UnsupportedError: export_ipc of this block|DeviceError: cuIpcGetMemHandle)"
        ):
            peer.run("device.memory.export_ipc(mapping.tensor)")
    finally:
        peer.close()


@pytest.mark.multigpu
@pytest.mark.parametrize("visible", [[0, 1], [1, 0], [1], [0]], ids=str)
def test_renumbered_devices_and_peers(runtime_folder: object, visible: list[int]) -> None:
    """The exporter is on GPU 1; the importer's device 0 is each of the two, and sees the other one or not."""
    device = get_device("cuda:1")
    peer = Peer("cuda", device.launch.worker_environment(visible))
    try:
        tensor = torch.arange(1 << 20, device=device.torch_device, dtype=torch.float32)
        text = exported(device, tensor[1:])
        got = peer.run(
            "mapping = device.memory.import_ipc(handle_of(text))\n"
            "t = mapping.tensor\n"
            "copied = torch.empty_like(t).copy_(t)\n"
            "t[-1] = -5\n"
            "device.synchronize()\n"
            "result = [str(t.device), copied.double().sum().item(), (t[:9] * 2).tolist(), device.properties().uuid]",
            text=text,
        )
        total = ((1 << 20) - 1) * (1 << 20) // 2
        assert got[:3] == ["cuda:0", total, [2.0 * number for number in range(1, 10)]]
        assert (got[3] == device.properties().uuid) == (visible[0] == 1)
        assert tensor[-1].item() == -5
        peer.run("del t; mapping.close()")
        device.memory.revoke(IpcHandle.from_bytes(bytes.fromhex(text)), timeout_s=20)
    finally:
        peer.close()


@pytest.mark.multigpu
def test_an_event_of_another_gpu(runtime_folder: object) -> None:
    device, peer = get_device("cuda:1"), Peer("cuda", {})
    try:
        event = device.streams.event(interprocess=True)
        data = device.streams.export_event(event).to_bytes().hex()
        event.record(device.streams.current())
        peer.run(
            "event = device.streams.import_event(event_of(data))\n"
            "event.wait(device.streams.current()); device.synchronize()\n",
            data=data,
        )
    finally:
        peer.close()
