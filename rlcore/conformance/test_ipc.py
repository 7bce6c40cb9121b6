"""Memory shared between processes: one memory and not a copy, and nobody frees what another still uses."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlcore.conformance.peer import Peer, PeerError
from rlcore.conformance.work import MB, BusyWork, grown
from rlcore.device import Device
from rlcore.errors import DeviceError, InvalidInputError, StateError
from rlcore.process.status import maker_of_shared_memory
from rlcore.types import IpcHandle

TASKS = "rlcore.conformance.ipc_tasks"
ALLOCATED = "rlcore.conformance.memory_tasks:allocated"
OPEN, READ, WRITE, CLOSE = (f"{TASKS}:{name}" for name in ("open_handle", "read", "write", "close"))
EXPORT, READ_EXPORTED, IS_REVOKED = (f"{TASKS}:{name}" for name in ("export", "read_exported", "is_revoked"))
CYCLES = 50
SPANS = 3

pytestmark = pytest.mark.covers("memory.export_ipc", "memory.import_ipc")


@pytest.fixture(autouse=True)
def _nothing_stays_exported(device: Device) -> Iterator[None]:
    before = {export.export_id for export in device.memory.ledger()}
    yield
    left = [export for export in device.memory.ledger() if export.export_id not in before]
    assert not left, f"the ledger still has {left}"


def exported(device: Device, values: torch.Tensor) -> tuple[torch.Tensor, IpcHandle]:
    tensor = values.to(device.torch_device, copy=True)
    device.synchronize()
    return tensor, device.memory.export_ipc(tensor)


def wait_until(is_true: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_values_go_both_ways_through_one_memory(device: Device, peer: Peer, dtype: torch.dtype) -> None:
    tensor, handle = exported(device, torch.arange(12).view(3, 4).to(dtype))
    assert peer.ask(OPEN, 1, handle.to_bytes()) == list(range(12))
    tensor.fill_(7)
    device.synchronize()
    assert peer.ask(READ, 1) == [7] * 12
    peer.ask(WRITE, 1, 9)
    assert tensor.float().unique().tolist() == [9]
    peer.ask(CLOSE, 1)
    device.memory.revoke(handle)


def test_an_imported_tensor_is_no_copy(device: Device, peer: Peer, other_peer: Peer) -> None:
    tensor, handle = exported(device, torch.zeros(16 * MB))
    importers = (peer, other_peer)
    for importer in importers:
        importer.ask(EXPORT, 9, [1.0])  # its device is warm
    before = [importer.ask(ALLOCATED) for importer in importers]
    for number, importer in enumerate(importers, 1):
        importer.ask(OPEN, 1, device.memory.export_ipc(tensor[:1]).to_bytes())
        importer.ask(WRITE, 1, number)
        assert tensor[0].item() == number
    assert peer.ask(READ, 1) == [2]
    for importer, allocated in zip(importers, before, strict=True):
        assert importer.ask(ALLOCATED) - allocated < 32 * MB
        importer.ask(CLOSE, 1)
    device.memory.revoke(handle)


def test_views_of_one_storage_are_one_export_and_keep_their_strides(device: Device, peer: Peer) -> None:
    tensor, handle = exported(device, torch.arange(24.0).view(4, 6))
    views = [tensor.t(), tensor[1:3, ::2], tensor[3, 5]]
    handles = [device.memory.export_ipc(view) for view in views]
    assert {h.export_id for h in handles} == {handle.export_id}
    for key, (view, view_handle) in enumerate(zip(views, handles, strict=True)):
        assert peer.ask(OPEN, key, view_handle.to_bytes()) == view.flatten().tolist()
    assert len({peer.ask(f"{TASKS}:address", key) for key in range(3)}) == 1
    peer.ask(WRITE, 1, -1)
    assert (tensor == -1).sum().item() == 6
    for key in range(3):
        peer.ask(CLOSE, key)
    device.memory.revoke(handle)


def test_a_parameter_stays_what_it_is(device: Device, peer: Peer) -> None:
    parameter = torch.nn.Parameter(torch.ones(5, device=device.torch_device))
    view = parameter.detach()[1:]
    device.synchronize()
    handle = device.memory.export_ipc(parameter)
    assert peer.ask(OPEN, 1, handle.to_bytes()) == [1] * 5
    with torch.no_grad():
        parameter.mul_(3)
    device.synchronize()
    assert peer.ask(READ, 1) == [3] * 5
    assert view.tolist() == [3] * 4
    peer.ask(CLOSE, 1)
    device.memory.revoke(handle)


def test_importing_twice_opens_once_and_closing_one_leaves_the_other(device: Device, peer: Peer) -> None:
    tensor, handle = exported(device, torch.arange(4.0))
    for key in (1, 2):
        peer.ask(OPEN, key, handle.to_bytes())
    peer.ask(CLOSE, 1)
    tensor.fill_(5)
    device.synchronize()
    assert peer.ask(READ, 2) == [5] * 4
    with pytest.raises(StateError, match=f"still open in process {peer.pid}"):
        device.memory.revoke(handle, timeout_s=0.2)
    peer.ask(CLOSE, 2)
    device.memory.revoke(handle)


def test_two_tensors_of_one_block_of_memory_are_closed_and_revoked_each_by_itself(device: Device, peer: Peer) -> None:
    tensors = [torch.full((4,), float(number), device=device.torch_device) for number in (1, 2)]  # allocators join them
    device.synchronize()
    first, second = (device.memory.export_ipc(tensor) for tensor in tensors)
    for key, handle in enumerate((first, second), 1):
        assert peer.ask(OPEN, key, handle.to_bytes()) == [key] * 4
    peer.ask(CLOSE, 1)
    peer.ask(WRITE, 2, 5)
    assert tensors[1].tolist() == [5] * 4
    device.memory.revoke(first)
    assert peer.ask(READ, 2) == [5] * 4
    peer.ask(CLOSE, 2)
    device.memory.revoke(second)


def test_the_exporter_imports_its_own_memory_as_a_view(device: Device) -> None:
    tensor, handle = exported(device, torch.arange(4.0))
    with device.memory.import_ipc(handle) as mapping:
        mapping.tensor.add_(1)
        assert tensor.tolist() == [1, 2, 3, 4]
        assert mapping.tensor.data_ptr() == tensor.data_ptr()
    with pytest.raises(StateError, match="is closed"):
        _ = mapping.tensor
    mapping.close()
    device.memory.revoke(handle)


# ------------------------------------------------------------------------------------------------- revoke


@pytest.mark.covers("memory.revoke", "memory.ledger")
def test_revoke_has_importers_close_and_lets_the_memory_go(device: Device, peer: Peer) -> None:
    tensor, handle = exported(device, torch.arange(4.0))
    peer.ask(OPEN, 1, handle.to_bytes(), True)
    (row,) = [export for export in device.memory.ledger() if export.export_id == handle.export_id]
    assert row.claims == {peer.pid: 1}
    assert row.storage_bytes == tensor.untyped_storage().nbytes()
    device.memory.revoke(handle)
    assert handle.export_id not in {export.export_id for export in device.memory.ledger()}
    assert peer.ask(IS_REVOKED, 1) is True
    with pytest.raises(PeerError, match=r"StateError: .*is closed"):
        peer.ask(READ, 1)
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.covers("memory.revoke")
def test_what_was_revoked_can_be_neither_revoked_nor_imported_but_exported_again(device: Device, peer: Peer) -> None:
    tensor, handle = exported(device, torch.arange(4.0))
    peer.ask(OPEN, 1, handle.to_bytes(), True)
    device.memory.revoke(handle)
    with pytest.raises(StateError, match="was revoked before; export the tensor again"):
        device.memory.revoke(handle)
    with pytest.raises(StateError, match="was revoked"):
        device.memory.import_ipc(handle)
    with pytest.raises(PeerError, match=r"StateError: .*was revoked"):
        peer.ask(OPEN, 2, handle.to_bytes())
    again = device.memory.export_ipc(tensor)
    assert again.export_id != handle.export_id
    assert peer.ask(OPEN, 3, again.to_bytes(), True) == [0, 1, 2, 3]
    device.memory.revoke(again)


@pytest.mark.covers("memory.revoke", "memory.ledger")
def test_memory_that_an_importer_keeps_stays_owned_and_the_importer_is_named(device: Device, peer: Peer) -> None:
    tensor, handle = exported(device, torch.arange(4.0))
    address = tensor.data_ptr()
    peer.ask(OPEN, 1, handle.to_bytes())
    del tensor
    with pytest.raises(StateError, match=f"still open in process {peer.pid} .*the memory stays owned"):
        device.memory.revoke(handle, timeout_s=0.3)
    other = torch.full((4,), 8.0, device=device.torch_device)
    assert other.data_ptr() != address
    device.synchronize()
    assert peer.ask(READ, 1) == [0, 1, 2, 3]
    assert peer.ask(IS_REVOKED, 1) is True
    peer.ask(CLOSE, 1)
    device.memory.revoke(handle)


@pytest.mark.covers("memory.revoke")
def test_only_the_exporter_revokes(device: Device, peer: Peer) -> None:
    handle = IpcHandle.from_bytes(peer.ask(EXPORT, 1, [1.0, 2.0]))
    with pytest.raises(StateError, match=f"belongs to process {peer.pid}: only that one can revoke it"):
        device.memory.revoke(handle)


# ------------------------------------------------------------------------------------------------- deaths


@pytest.mark.covers("memory.revoke")
def test_a_killed_importer_has_closed(device: Device, peer: Peer) -> None:
    tensor, handle = exported(device, torch.arange(4.0))
    peer.ask(OPEN, 1, handle.to_bytes())
    peer.kill()
    device.memory.revoke(handle, timeout_s=20)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_killed_exporter_is_noticed_and_named_and_others_go_on(device: Device, peer: Peer, other_peer: Peer) -> None:
    handle = IpcHandle.from_bytes(peer.ask(EXPORT, 1, [1.0, 2.0]))
    heard: list[Any] = []
    mapping = device.memory.import_ipc(handle, heard.append)
    assert mapping.tensor.tolist() == [1, 2]
    peer.kill()
    wait_until(lambda: mapping.is_revoked, "is_revoked of a killed exporter's mapping")
    wait_until(lambda: heard == [mapping], "on_revoke(mapping)")
    mapping.close()
    with pytest.raises(DeviceError, match=f"process {peer.pid}.* has ended"):
        device.memory.import_ipc(handle)
    with device.memory.import_ipc(IpcHandle.from_bytes(other_peer.ask(EXPORT, 1, [3.0]))) as mapping:
        mapping.tensor.fill_(4)
        device.synchronize()
        assert other_peer.ask(READ_EXPORTED, 1) == [4]


# ------------------------------------------------------------------------------------------------- cycles


@pytest.mark.covers("memory.revoke", "memory.ledger")
def test_cycles_leave_memory_descriptors_and_shared_memory_as_they_were(device: Device, peer: Peer) -> None:
    def cycle() -> None:
        tensor = torch.ones(MB // 4, device=device.torch_device)
        device.synchronize()
        handle = device.memory.export_ipc(tensor[:2])
        assert peer.ask(OPEN, 1, handle.to_bytes(), True) == [1, 1]
        device.memory.revoke(handle)
        del tensor
        device.memory.empty_cache()  # so that each cycle has a block of its own to open and close

    def footprint() -> dict[str, int]:
        """Return the figures of this process and of the peer."""
        gc.collect()
        device.synchronize()
        device.memory.empty_cache()
        makers = [maker_of_shared_memory(name) for name in os.listdir("/dev/shm")]
        with open(f"/proc/{peer.pid}/maps", errors="replace") as lines:
            num_mapped = sum(1 for _ in lines)
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "descriptors of the peer": len(os.listdir(f"/proc/{peer.pid}/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "threads of the peer": len(os.listdir(f"/proc/{peer.pid}/task")),
            "exports": len(device.memory.ledger()),
            "allocated bytes": device.memory.stats().allocated_bytes,
            "files of shared memory": makers.count(os.getpid()) + makers.count(peer.pid),
            "mappings of the peer": num_mapped,
        }

    may_grow = {"allocated bytes": CYCLES * MB // 4, "mappings of the peer": CYCLES // 2}
    for _ in range(3):
        cycle()
    states, leaked = [footprint()], {"?"}
    while leaked and len(states) <= SPANS:
        for _ in range(CYCLES):
            cycle()
        states.append(footprint())
        leaked = grown(states, may_grow)
    assert not leaked, states


# ------------------------------------------------------------------------------------------------- order, errors


@pytest.mark.covers("streams.export_event", "streams.import_event", "streams.event")
def test_an_interprocess_event_orders_another_process_behind_this_one(device: Device, peer: Peer) -> None:
    busy = BusyWork.of(device)
    tensor, handle = exported(device, torch.zeros(4))
    peer.ask(OPEN, 1, handle.to_bytes())
    event = device.streams.event(interprocess=True)
    busy.queue()
    tensor.fill_(6)
    event.record(device.streams.current())
    assert peer.ask(f"{TASKS}:wait_and_read", 1, device.streams.export_event(event).to_bytes()) == [6] * 4
    peer.ask(CLOSE, 1)
    device.memory.revoke(handle)


def test_a_handle_is_plain_bytes(device: Device) -> None:
    _, handle = exported(device, torch.ones(2))
    assert IpcHandle.from_bytes(handle.to_bytes()) == handle
    assert b"pickle" not in handle.to_bytes()
    with pytest.raises(InvalidInputError, match="are no IpcHandle"):
        IpcHandle.from_bytes(b"\x80\x04K\x01.")
    device.memory.revoke(handle)


def test_what_cannot_be_exported_or_imported_is_refused(device: Device) -> None:
    with pytest.raises(InvalidInputError, match="export it with that device"):
        device.memory.export_ipc(torch.ones(1, device="meta"))
    with pytest.raises(InvalidInputError, match=r"takes a plain torch.Tensor, got list"):
        device.memory.export_ipc([1.0])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="import_ipc takes an IpcHandle, got bytes"):
        device.memory.import_ipc(b"")  # type: ignore[arg-type]
