"""Storages of one block of memory that are exported together: claimed, opened and revoked as one."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch

from rlcore.devices.cuda import driver
from rlcore.devices.cuda.sharing import CudaSharing
from rlcore.devices.ipc import exporter
from rlcore.errors import InvalidInputError, StateError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import IpcHandle

from .conftest import Peer, PeerError, wait_until
from .one_block import OneBlock

pytestmark = pytest.mark.usefixtures("runtime_folder")

VALUES = [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]
IMPORT = """
mappings = [device.memory.import_ipc(handle_of(text)) for text in texts]
result = [mapping.tensor.tolist() for mapping in mappings]
"""


@pytest.fixture
def tensors(device: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """In one block, each in a storage of its own."""
    if device.type != "cpu":  # a pool begins with a block of 2 MiB, without holes that others have left
        with device.memory.pool("together"):
            tensors = [torch.tensor(values, device=device.torch_device) for values in VALUES]
        yield tensors
        return
    block = OneBlock(device)
    monkeypatch.setattr(device.memory._ipc, "_sharing", block)
    peer.run(
        "import sys; sys.path.insert(0, folder)\n"
        "from one_block import OneBlock\n"
        "real, device.memory._ipc._sharing = device.memory._ipc._sharing, OneBlock(device)\n"
        "OneBlock.opened.clear()",
        folder=str(Path(__file__).parent),
    )
    yield [block.tensor(offset, values) for offset, values in zip([1024, 0, 4096], VALUES, strict=True)]
    peer.run("device.memory._ipc._sharing = real")


def together(device: Any, tensors: list[torch.Tensor]) -> tuple[list[IpcHandle], list[str]]:
    """A handle of each tensor, and the same as text."""
    device.synchronize()
    blocks, places = device.memory.export_ipc_together(tensors)
    assert [block.shape for block in blocks] == [(block.storage_bytes,) for block in blocks]
    handles = [
        dataclasses.replace(
            blocks[number],
            storage_offset_bytes=first,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )
        for tensor, (number, first) in zip(tensors, places, strict=True)
    ]
    return handles, [handle.to_bytes().hex() for handle in handles]


def test_one_export_is_claimed_and_opened_once(device: Any, peer: Peer, tensors: list[torch.Tensor]) -> None:
    handles, texts = together(device, [*tensors, tensors[1][1:]])
    assert len({handle.export_id for handle in handles}) == 1
    assert peer.run(IMPORT, texts=texts) == [*VALUES, VALUES[1][1:]]
    if device.type == "cpu":
        assert peer.run("result = device.memory._ipc._sharing.opened") == [0], "from the first storage on"
    rows = [row for row in device.memory.ledger() if row.export_id == handles[0].export_id]
    assert {row.address for row in rows} == {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert [row.claims for row in rows] == [{peer.pid: 1}] * 3
    with pytest.raises(StateError, match=r"still open in process \d+ after 0.1 s"):
        device.memory.revoke(handles[2], timeout_s=0.1)
    peer.run("for mapping in mappings: mapping.close()")
    device.memory.revoke(handles[2])
    assert not [row for row in device.memory.ledger() if row.export_id == handles[0].export_id]


IMPORT_TOGETHER = """
mappings = device.memory.import_ipc_together([handle_of(text) for text in texts])
result = [mapping.tensor.tolist() for mapping in mappings]
"""


def test_many_are_imported_at_once_or_none(device: Any, peer: Peer) -> None:
    values = [[float(number)] for number in range(70)]  # more than are asked for ahead of the answers
    tensors = [torch.tensor(one, device=device.torch_device) for one in values]
    device.synchronize()
    handles = [device.memory.export_ipc(tensor) for tensor in tensors]
    texts = [handle.to_bytes().hex() for handle in handles]
    ids = {handle.export_id for handle in handles}

    def held() -> set[str]:
        return {row.export_id for row in device.memory.ledger() if row.export_id in ids and peer.pid in row.claims}

    assert peer.run(IMPORT_TOGETHER, texts=[*texts, texts[0], *texts[:2]]) == [*values, values[0], *values[:2]]
    assert held() == ids
    peer.run("for mapping in mappings[:70]: mapping.close()")
    wait_until(lambda: len(held()) == len(ids & {handles[0].export_id, handles[1].export_id}))
    peer.run("for mapping in mappings: mapping.close()")
    wait_until(lambda: not held())
    device.memory.revoke(handles[40])
    with pytest.raises(PeerError, match=rf"^StateError: export {handles[40].export_id} of process \d+ was revoked"):
        peer.run(IMPORT_TOGETHER, texts=texts)
    wait_until(lambda: not held())  # what was granted before and after it was given back
    for export_id, handle in {handle.export_id: handle for handle in handles}.items():
        if export_id != handles[40].export_id:
            device.memory.revoke(handle)


def test_handles_of_several_processes_are_not_imported_together(device: Any, peer: Peer) -> None:
    tensor = torch.zeros(1, device=device.torch_device)
    own = device.memory.export_ipc(tensor)
    made = peer.run(
        "t = torch.zeros(1, device=device.torch_device); h = device.memory.export_ipc(t); result = h.to_bytes().hex()"
    )
    with pytest.raises(InvalidInputError, match="imported together are of one process, these of 2"):
        device.memory.import_ipc_together([own, IpcHandle.from_bytes(bytes.fromhex(made))])
    with pytest.raises(InvalidInputError, match=r"^import_ipc_together takes a list or tuple as handles, got None$"):
        device.memory.import_ipc_together(None)
    assert device.memory.import_ipc_together([]) == []
    device.memory.revoke(own)
    peer.run("device.memory.revoke(h)")


def test_what_was_exported_alone_keeps_its_export(device: Any, peer: Peer, tensors: list[torch.Tensor]) -> None:
    alone = device.memory.export_ipc(tensors[0])
    handles, texts = together(device, tensors)
    assert handles[0].export_id == alone.export_id
    assert len({handle.export_id for handle in handles}) == 2
    peer.run(IMPORT, texts=texts[:1])
    device.memory.revoke(handles[1])  # nobody has that one open
    assert peer.run("result = mappings[0].tensor.tolist()") == VALUES[0]
    assert together(device, tensors)[0][0].export_id == alone.export_id
    peer.run("mappings[0].close()")
    for export_id, handle in {handle.export_id: handle for handle in together(device, tensors)[0]}.items():
        assert export_id == handle.export_id
        device.memory.revoke(handle)


def test_storages_at_one_address_are_what_they_are(device: Any, peer: Peer) -> None:
    memory = torch.arange(4.0, device=device.torch_device)
    both = [torch.empty(0, device=device.torch_device).set_(_another_storage_at(memory), 0, (4,), (1,)) for _ in "ab"]
    handles, texts = together(device, both)
    assert peer.run(IMPORT, texts=texts) == [[0.0, 1.0, 2.0, 3.0]] * 2
    peer.run("for mapping in mappings: mapping.close()")
    for handle in {handle.export_id: handle for handle in handles}.values():
        device.memory.revoke(handle)


def _another_storage_at(memory: torch.Tensor) -> torch.UntypedStorage:
    if memory.is_cpu:
        return torch.from_numpy(memory.numpy()).untyped_storage()
    storage: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(  # type: ignore[assignment]
        memory.data_ptr(), memory.device, memory.nbytes
    )
    return storage


def test_all_are_exported_or_none(device: Any, tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def exports() -> list[tuple[str, int]]:  # who has them open may still change: other tests' peers close theirs
        return [(row.export_id, row.storage_bytes) for row in device.memory.ledger()]

    kept = device.memory.export_ipc(tensors[0])
    before = exports()
    sharing = device.memory._ipc._sharing
    share = type(sharing).share

    def refuses_the_last(self: Any, storage: torch.UntypedStorage) -> Any:
        if storage.data_ptr() == tensors[2].untyped_storage().data_ptr():
            raise UnsupportedError("export_ipc of this block of memory", "it is another kind")
        return share(self, storage)

    monkeypatch.setattr(type(sharing), "blocks", lambda self, storages: [[storage] for storage in storages])
    monkeypatch.setattr(type(sharing), "share", refuses_the_last)
    with pytest.raises(UnsupportedError, match="another kind"):
        device.memory.export_ipc_together(tensors)
    assert exports() == before
    device.memory.revoke(kept)


def test_the_exporter_itself_opens_each(device: Any, tensors: list[torch.Tensor]) -> None:
    handles, _ = together(device, tensors)
    mappings = [device.memory.import_ipc(handle) for handle in handles]
    assert [mapping.tensor.tolist() for mapping in mappings] == VALUES
    assert [mapping.tensor.data_ptr() for mapping in mappings] == [tensor.data_ptr() for tensor in tensors]
    for mapping in mappings:
        mapping.close()
    device.memory.revoke(handles[0])


def test_one_that_was_freed_ends_the_export_of_all(device: Any, peer: Peer, tensors: list[torch.Tensor]) -> None:
    handles, texts = together(device, tensors)
    free(tensors[2])
    with pytest.raises(PeerError, match=r"^StateError: export \w+ of process \d+ was freed or resized by its owner"):
        peer.run(IMPORT, texts=texts[:1])
    again, texts = together(device, tensors[:2])
    assert again[0].export_id == again[1].export_id != handles[0].export_id, "nobody had it open"
    peer.run(IMPORT, texts=texts)
    free(tensors[0])
    with pytest.raises(StateError, match=rf"resized while process {peer.pid} had it open"):
        together(device, tensors[:2])
    peer.run("for mapping in mappings: mapping.close()")


def test_what_is_exported_already_is_looked_at_once(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has 18,867 storages, and each of two samplers asks for all: all looked at for each are 356 million."""
    if device.type != "cpu":
        pytest.skip("the block of the test's own is memory of the host")
    block = OneBlock(device)
    monkeypatch.setattr(device.memory._ipc, "_sharing", block)
    tensors = [block.tensor(64 * number, [1.0]) for number in range(200)]
    first, _ = together(device, tensors)
    looked: list[int] = []
    real = exporter._range_of
    monkeypatch.setattr(exporter, "_range_of", lambda storage: looked.append(0) or real(storage))
    again, _ = together(device, tensors)
    assert again == first
    assert len(looked) < 3 * len(tensors), "by the ledger, and whether one has moved"
    device.memory.revoke(first[0])


def test_the_driver_is_asked_once_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    first, asked = memory.data_ptr(), []

    def block_at(address: int) -> tuple[int, int]:
        asked.append(address - first)
        return first + (address - first) // 256 * 256, 256

    monkeypatch.setattr(driver, "current", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(driver, "is_ipc_capable", lambda address: True)
    monkeypatch.setattr(driver, "block_at", block_at)
    offsets = [768, 0, 240, 256, 64, 0]
    storages = [_another_storage_at(memory[offset : offset + 16]) for offset in offsets]
    found = CudaSharing(get_device("cpu")).blocks(storages)  # type: ignore[arg-type]
    assert [[storage.data_ptr() - first for storage in block] for block in found] == [[0, 0, 64, 240], [256], [768]]
    assert asked == [0, 256, 768]


def free(tensor: torch.Tensor) -> None:
    storage: Any = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
    elif not hasattr(storage, "_swap_data_ptr_"):
        pytest.skip(f"torch {torch.__version__} cannot free a storage in memory of the test's own")
    else:
        storage._swap_data_ptr_(torch.zeros(storage.nbytes() // 4).untyped_storage())


def test_a_ctrl_c_anywhere_in_an_import_leaves_nothing_open(device: Any, peer: Peer) -> None:
    """Raised at each line that the user's thread runs of it, one after the other; a Python without tracing has none."""
    made = peer.run(
        "ts = [torch.full((1,), float(n), device=device.torch_device) for n in range(3)]; device.synchronize()\n"
        "hs = [device.memory.export_ipc(t) for t in ts]; result = [h.to_bytes().hex() for h in hs]"
    )
    handles = [IpcHandle.from_bytes(bytes.fromhex(text)) for text in made]
    device.memory.import_ipc(handles[0]).close()  # the connection stays, as after a first round
    num_lines = 0

    def interrupted(at: int) -> list[Any] | None:
        """What the import gives, or None if its line number ``at`` was interrupted."""
        nonlocal num_lines
        num_lines = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal num_lines
            if event == "line" and Path(frame.f_code.co_filename).parent.name == "ipc":
                num_lines += 1
                if num_lines == at:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return cast("list[Any]", device.memory.import_ipc_together(handles))
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)

    at = 1
    while (mappings := interrupted(at)) is None:
        at += 1
    assert at > 10, f"only {num_lines} lines were interrupted"
    assert [mapping.tensor.item() for mapping in mappings] == [0.0, 1.0, 2.0]
    for mapping in mappings:
        mapping.close()
    peer.run("for h in hs: device.memory.revoke(h, timeout_s=30)")  # raises where one is open here
