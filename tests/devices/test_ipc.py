"""Memory shared between unrelated processes: what arrives, who keeps it alive, and how it is taken back."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rlcore.devices.ipc.exporter import IpcExporter
from rlcore.devices.ipc.importer import IpcImporter
from rlcore.devices.ipc.socket import listen
from rlcore.errors import DeviceError, InvalidInputError, StateError
from rlcore.process.status import start_time
from rlcore.registry import get_device
from rlcore.types import EventHandle, IpcHandle

from .conftest import MakePeer, Peer, PeerError, wait_until

pytestmark = pytest.mark.usefixtures("runtime_folder")

MB = 2**20


def numbered(device: Any, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = torch.Size(shape).numel()
    tensor = torch.arange(size, device=device.torch_device).to(dtype).reshape(shape)
    device.synchronize()
    return tensor


def export(device: Any, tensor: torch.Tensor) -> str:
    """A handle as text that a peer turns back."""
    return device.memory.export_ipc(tensor).to_bytes().hex()


def handle_of(text: str) -> IpcHandle:
    return IpcHandle.from_bytes(bytes.fromhex(text))


def claims(device: Any, text: str) -> dict[int, int]:
    (row,) = [row for row in device.memory.ledger() if row.export_id == handle_of(text).export_id]
    return row.claims


def import_in(peer: Peer, text: str, name: str = "mapping") -> None:
    peer.run(f"{name} = device.memory.import_ipc(handle_of(text))", text=text)


EXPORT = """
tensor = torch.arange({size}, dtype=torch.float32, device=device.torch_device)
device.synchronize()
handle = device.memory.export_ipc(tensor)
result = handle.to_bytes().hex()
"""

# ------------------------------------------------------------------------------------------ what arrives

TENSORS = {
    "whole": lambda device: numbered(device, 3, 4),
    "offset": lambda device: numbered(device, 10, 4)[3:5],
    "transposed": lambda device: numbered(device, 3, 4).t(),
    "strided": lambda device: numbered(device, 6, 8)[1::2, ::3],
    "expanded": lambda device: numbered(device, 3, 1).expand(3, 4),
    "scalar": lambda device: numbered(device, 1)[0],
    "empty": lambda device: numbered(device, 0, 4),
    "empty part of a storage": lambda device: numbered(device, 3, 4)[:0],
    "bfloat16": lambda device: numbered(device, 5, dtype=torch.bfloat16)[1:],
    "bool": lambda device: numbered(device, 5, dtype=torch.bool),
    "complex": lambda device: numbered(device, 5, dtype=torch.complex64),
    "float8": lambda device: numbered(device, 5, dtype=torch.float8_e4m3fn),
    "another dtype's view": lambda device: numbered(device, 3, 4).view(torch.int16)[1],
    "parameter": lambda device: torch.nn.Parameter(numbered(device, 3, 4)),
    "result of autograd": lambda device: numbered(device, 3, 4).requires_grad_() * 2,
}


def test_every_kind_of_tensor_arrives_as_it_is(device: Any, peer: Peer) -> None:
    for name, make in TENSORS.items():
        tensor = make(device)
        device.synchronize()
        text = export(device, tensor)
        got = peer.run(
            "with device.memory.import_ipc(handle_of(text)) as m:\n"
            "    t = m.tensor\n"
            "    same = t.float() if t.is_floating_point() else t\n"
            "    same = torch.view_as_real(same) if same.is_complex() else same\n"
            "    result = [str(t.dtype), list(t.shape), list(t.stride()), str(t.device), t.requires_grad]\n"
            "    result += [same.tolist()]\n"
            "    del t, same",
            text=text,
        )
        values = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        shape, stride = list(tensor.shape), list(tensor.stride())
        assert got == [str(tensor.dtype), shape, stride, str(tensor.device), False, values.tolist()], name
        device.memory.revoke(handle_of(text))


def test_tensors_of_one_storage_are_one_export_opened_once(device: Any, peer: Peer) -> None:
    tensor = numbered(device, 8)
    first, second = export(device, tensor[:4]), export(device, tensor[4:])
    assert handle_of(first).export_id == handle_of(second).export_id
    import_in(peer, first, "a")
    import_in(peer, second, "b")
    assert claims(device, first) == {peer.pid: 1}
    assert peer.run("result = b.tensor.data_ptr() - a.tensor.data_ptr()") == 4 * 4
    peer.run("a.close()")
    assert claims(device, first) == {peer.pid: 1}
    assert peer.run("result = b.tensor.tolist()") == [4, 5, 6, 7]
    peer.run("b.close()")
    wait_until(lambda: claims(device, first) == {})
    device.memory.revoke(handle_of(first))


def test_slots_of_one_memory_import_from_each_other(device: Any) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU an index is a device of its own: test_renumbered_devices")
    text = export(device, numbered(device, 3))
    with get_device("cpu:3").memory.import_ipc(handle_of(text)) as mapping:
        assert mapping.tensor.tolist() == [0, 1, 2]


# --------------------------------------------------------------------------------------------- mappings


def test_a_closed_mapping_has_no_tensor(device: Any) -> None:
    handle = device.memory.export_ipc(numbered(device, 2, 3))
    mapping = device.memory.import_ipc(handle)
    assert repr(mapping) == f"<open mapping of export {handle.export_id}: float32 [2, 3]>"
    mapping.close()
    mapping.close()
    assert mapping.is_closed and not mapping.is_revoked
    assert repr(mapping) == f"<closed mapping of export {handle.export_id}: float32 [2, 3]>"
    with pytest.raises(StateError, match=rf"^the mapping of export {handle.export_id} is closed; open another"):
        _ = mapping.tensor
    device.memory.revoke(handle)


def test_many_threads_open_it_once(device: Any, peer: Peer) -> None:
    text = export(device, numbered(device, 16))
    peer.run(
        "import threading, concurrent.futures\n"
        "gate = threading.Barrier(8)\n"
        "def use(_):\n"
        "    gate.wait()\n"
        "    for _ in range(50):\n"
        "        with device.memory.import_ipc(handle) as m: assert m.tensor[5].item() == 5\n"
        "handle = handle_of(text)\n"
        "with concurrent.futures.ThreadPoolExecutor(8) as threads: list(threads.map(use, range(8)))",
        text=text,
    )
    wait_until(lambda: claims(device, text) == {})
    device.memory.revoke(handle_of(text), timeout_s=0)


# ------------------------------------------------------------------------------------------------ revoke


def test_memory_lives_until_it_is_revoked_and_no_longer(device: Any) -> None:
    size = 32 * MB
    numbered(device, 1)
    gc.collect()  # what earlier tests left would be freed meanwhile
    device.memory.empty_cache()
    before = device.memory.stats().allocated_bytes
    tensor = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    handle = device.memory.export_ipc(tensor)
    del tensor
    device.memory.empty_cache()  # on the CPU the private memory it has left
    assert abs(device.memory.stats().allocated_bytes - before - size) < 8 * MB
    with device.memory.import_ipc(handle) as mapping:
        assert mapping.tensor.sum(dtype=torch.int64).item() == size
    device.memory.revoke(handle)
    device.memory.empty_cache()
    assert abs(device.memory.stats().allocated_bytes - before) < 8 * MB
    assert handle.export_id not in [row.export_id for row in device.memory.ledger()]


def test_revoke_asks_and_waits_for_the_word_of_the_importer(device: Any, peer: Peer) -> None:
    text = export(device, numbered(device, 4))
    peer.run(
        "import time\n"
        "def let_go(mapping):\n"
        "    time.sleep(0.3)\n"
        "    seen.append([mapping.is_revoked, mapping.tensor[3].item()])\n"
        "    mapping.close()\n"
        "seen = []\n"
        "mapping = device.memory.import_ipc(handle_of(text), on_revoke=let_go)",
        text=text,
    )
    started = time.monotonic()
    device.memory.revoke(handle_of(text), timeout_s=20)
    assert time.monotonic() - started > 0.3
    assert peer.run("result = [seen, mapping.is_closed]") == [[[True, 3]], True]
    with pytest.raises(
        PeerError, match=r"^StateError: the mapping of export \w+ was revoked by its exporter and is clos"
    ):
        peer.run("mapping.tensor")


def test_past_the_deadline_the_memory_stays_owned(device: Any, peer: Peer) -> None:
    tensor = numbered(device, 4)
    text = export(device, tensor)
    handle = handle_of(text)
    import_in(peer, text)
    with pytest.raises(
        StateError, match=rf"{handle.export_id} is still open in process {peer.pid} after 0.2 s; the memory"
    ):
        device.memory.revoke(handle, timeout_s=0.2)
    assert claims(device, text) == {peer.pid: 1}
    wait_until(lambda: peer.run("result = mapping.is_revoked"))
    assert peer.run("result = mapping.tensor.tolist()") == [0, 1, 2, 3]
    with pytest.raises(StateError, match=rf"^export {handle.export_id} of process {os.getpid()} was revoked; export"):
        device.memory.import_ipc(handle)
    assert export(device, tensor) != text  # a new export of the same storage
    peer.run("mapping.close()")
    device.memory.revoke(handle, timeout_s=20)
    with pytest.raises(StateError, match=rf"^export {handle.export_id} was revoked before; export the tensor again"):
        device.memory.revoke(handle)
    with pytest.raises(
        PeerError, match=rf"^StateError: export {handle.export_id} of process {os.getpid()} was revoked"
    ):
        import_in(peer, text)


def test_a_mapping_of_this_process_is_asked_too(device: Any) -> None:
    handle = device.memory.export_ipc(numbered(device, 4))
    kept = device.memory.import_ipc(handle)
    with pytest.raises(StateError, match=rf"still open in process {os.getpid()} after 0 s"):
        device.memory.revoke(handle, timeout_s=0)
    assert kept.is_revoked
    kept.close()
    device.memory.revoke(handle, timeout_s=0)

    handle = device.memory.export_ipc(numbered(device, 4))
    closing = device.memory.import_ipc(handle, on_revoke=lambda mapping: mapping.close())
    device.memory.revoke(handle, timeout_s=0)
    assert closing.is_closed


def test_a_failing_on_revoke_stops_nothing(device: Any, peer: Peer) -> None:
    first, second = export(device, numbered(device, 4)), export(device, numbered(device, 4))
    peer.run(
        "fail = device.memory.import_ipc(handle_of(first), on_revoke=lambda mapping: 1 / 0)\n"
        "work = device.memory.import_ipc(handle_of(second), on_revoke=lambda mapping: mapping.close())",
        first=first,
        second=second,
    )
    with pytest.raises(StateError, match="is still open"):
        device.memory.revoke(handle_of(first), timeout_s=0.1)
    device.memory.revoke(handle_of(second), timeout_s=20)


# ------------------------------------------------------------------------------- processes that are ended


def test_an_importer_that_hangs_up_or_is_stopped_has_not_closed_and_a_killed_one_has(
    device: Any, make_peer: MakePeer, peer: Peer
) -> None:
    other, peer = peer, make_peer()
    text = export(device, numbered(device, 4))
    import_in(peer, text)
    assert claims(device, text) == {peer.pid: 1}
    peer.run(
        "import socket; from rlcore.devices.ipc.importer import importer\n"
        "for c in importer()._connections.values(): c._channel._connection.shutdown(socket.SHUT_RDWR)"
    )
    for seconds in (0.3, 0.2):
        with pytest.raises(StateError, match=rf"is still open in process {peer.pid} after {seconds} s"):
            device.memory.revoke(handle_of(text), timeout_s=seconds)
        peer.stop()
    served = export(device, numbered(device, 3))
    import_in(other, served)  # one that is stopped holds up nobody else
    assert other.run("result = mapping.tensor.tolist(); mapping.close()") == [0, 1, 2]
    device.memory.revoke(handle_of(served), timeout_s=20)
    peer.kill()
    device.memory.revoke(handle_of(text), timeout_s=20)


def test_an_exporter_that_is_stopped_is_named_and_that_it_was_killed_is_noticed(
    device: Any, make_peer: MakePeer, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is removed by the next process that makes one, or here by this one in another folder."""
    peer = make_peer()
    text = peer.run(EXPORT.format(size=4))
    path = Path(handle_of(text).exporter)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    peer.stop()
    with pytest.raises(DeviceError, match=rf"^process {peer.pid}, the exporter, did not answer within 0.2 s$"):
        device.memory.import_ipc(handle_of(text), timeout_s=0.2)
    os.kill(peer.pid, signal.SIGCONT)
    assert peer.run("result = 1") == 1
    with device.memory.import_ipc(handle_of(text)) as mapping:  # the late answer did no harm
        assert mapping.tensor.tolist() == [0, 1, 2, 3]
    wait_until(lambda: peer.run("result = [len(row.claims) for row in device.memory.ledger()]") == [0])
    heard: list[Any] = []
    mapping = device.memory.import_ipc(handle_of(text), on_revoke=heard.append)
    assert not mapping.is_revoked
    segments = f"torch_{peer.pid}_*"
    peer.kill()
    wait_until(lambda: heard == [mapping])
    assert mapping.is_revoked
    if device.type == "cpu":  # a GPU's memory is gone with its owner
        assert mapping.tensor.tolist() == [0, 1, 2, 3]
    mapping.close()
    with pytest.raises(DeviceError, match=rf"^process {peer.pid}, the exporter, has ended"):
        device.memory.import_ipc(handle_of(text))
    assert not list(Path("/dev/shm").glob(segments)), "they have no name any more"
    other = runtime_folder / "another"
    other.mkdir(mode=0o700)
    left = path.rename(other / path.name)
    monkeypatch.setenv("RLCORE_RUNTIME", str(other))
    listen_once()
    assert not left.exists()


def listen_once() -> None:
    """As a process that exports for the first time."""
    listener, path = listen()
    listener.close()
    path.unlink()


def test_a_strange_file_among_the_sockets_stops_nobody(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runtime_folder / "strange"
    folder.mkdir(mode=0o700)
    for name in ("ipc-a-b.sock", "ipc-1-2-3.sock"):
        (folder / name).touch()
    monkeypatch.setenv("RLCORE_RUNTIME", str(folder))
    listen_once()


@pytest.mark.slow
def test_a_child_that_the_exporter_forked_does_not_stand_in_for_it(device: Any, make_peer: MakePeer) -> None:
    peer = make_peer()
    if device.type != "cpu":
        pytest.skip("a process with a CUDA context must not fork")
    text = peer.run(EXPORT.format(size=4))
    ended = peer.run("import sys\nresult = os.fork()\nif not result:\n    sys.exit()")
    wait_until(lambda: start_time(ended) is None)
    mapping = device.memory.import_ipc(handle_of(text))  # its exit took nothing of its parent's away
    child = peer.run("import time\nresult = os.fork()\nif not result:\n    time.sleep(60)\n    os._exit(0)")
    peer.kill()
    try:
        wait_until(lambda: mapping.is_revoked)
    finally:
        os.kill(child, signal.SIGKILL)
    mapping.close()


@pytest.mark.slow
def test_a_process_that_ends_by_itself_leaves_no_socket(make_peer: MakePeer) -> None:
    peer = make_peer()
    path = Path(handle_of(peer.run(EXPORT.format(size=4))).exporter)
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    assert peer.process.wait(timeout=60) == 0
    assert not path.exists()


# ------------------------------------------------------------------------------------------- bad handles


def replaced(at: Any, **changes: Any) -> IpcHandle:
    return dataclasses.replace(at.memory.export_ipc(numbered(at, 3, 4)), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "abacus"}, r"this handle is of a 'abacus' device; import it with get_device\('abacus'\), not "),
        ({"boot_id": "x"}, r"was made on another machine, or before this one was restarted \(boot x, here "),
        ({"dtype": "float99"}, r"has no dtype 'float99'"),
        ({"dtype": "nn"}, r"has no dtype 'nn'"),
        ({"shape": (3, 5)}, r"describes a tensor that ends at byte 52 of a storage of 48"),
        ({"storage_offset_bytes": 6}, r"describes a tensor that begins at byte 6, within a value of float32"),
        ({"storage_offset_bytes": 4}, r"describes a tensor that ends at byte 52 of a storage of 48"),
    ],
)
def test_a_handle_that_cannot_be_is_refused(device: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        device.memory.import_ipc(replaced(device, **changes))


@pytest.mark.parametrize("changes", [{"device_uuid": "x"}, {"payload": b"x"}, {"storage_bytes": 2**40}])
def test_a_handle_that_differs_from_the_ledger_is_refused(device: Any, peer: Peer, changes: dict[str, Any]) -> None:
    handle = replaced(device, **changes)
    with pytest.raises(
        StateError, match=rf"^export {handle.export_id} of process {os.getpid()} is not what this handle"
    ):
        device.memory.import_ipc(handle)
    with pytest.raises(
        PeerError, match=rf"^StateError: export {handle.export_id} of process {os.getpid()} is not what"
    ):
        import_in(peer, handle.to_bytes().hex())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (-1, 4)}, r"at least 0 and a stride for each size, got shape \(-1, 4\)"),
        ({"stride": (1,)}, r"at least 0 and a stride for each size"),
        ({"storage_offset_bytes": -8}, r"at least 0"),
        ({"exporter": "socket"}, r"IpcHandle.exporter must be the path of a socket, got 'socket'"),
        ({"exporter": "/run/\x1b[31m"}, r"IpcHandle.exporter must be the path of a socket, got '/run/\\x1b"),
        ({"export_id": "1\x12"}, r"IpcHandle.export_id must be printable, got '1\\x12'"),
    ],
)
def test_a_handle_is_checked_when_it_is_made_or_read(device: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replaced(device, **changes)
    fields = dataclasses.asdict(device.memory.export_ipc(numbered(device, 3, 4)))
    with pytest.raises(InvalidInputError, match=r"^these \d+ bytes are no IpcHandle: "):
        IpcHandle.from_bytes(msgspec.msgpack.encode(fields | changes))


def test_bytes_that_are_no_handle_are_refused(device: Any) -> None:
    data = device.memory.export_ipc(numbered(device, 3)).to_bytes()
    for bad in (b"", b"\x80\x04\x95", data[:-1], data + b"x", msgspec.msgpack.encode({"device": 1})):
        with pytest.raises(InvalidInputError, match=rf"^these {len(bad)} bytes are no IpcHandle: "):
            IpcHandle.from_bytes(bad)
    with pytest.raises(InvalidInputError, match=r"^import_ipc takes an IpcHandle, got bytes; bytes become one by"):
        device.memory.import_ipc(data)
    with pytest.raises(InvalidInputError, match=r"^revoke takes the IpcHandle of an export, got bytes"):
        device.memory.revoke(data)
    with pytest.raises(InvalidInputError, match=r"bytes are no EventHandle, but have some of its fields$"):
        EventHandle.from_bytes(data)
    with pytest.raises(InvalidInputError, match=r"^IpcHandle.from_bytes takes what to_bytes gave, got str"):
        IpcHandle.from_bytes("text")  # type: ignore[arg-type]


def test_a_handle_with_any_bit_flipped_is_another_handle_or_refused(device: Any) -> None:
    data = device.memory.export_ipc(numbered(device, 3)).to_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(InvalidInputError):
            assert isinstance(IpcHandle.from_bytes(bytes(flipped)), IpcHandle)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), "30", None])
def test_a_timeout_that_is_none_is_refused(device: Any, timeout_s: Any) -> None:
    handle = device.memory.export_ipc(numbered(device, 3))
    for use in (device.memory.import_ipc, device.memory.revoke):
        with pytest.raises(InvalidInputError, match=rf"^timeout_s must be seconds, .* got {timeout_s!r}$"):
            use(handle, timeout_s=timeout_s)
    with pytest.raises(InvalidInputError, match=r"^on_revoke is called with the mapping, and 5 cannot be called$"):
        device.memory.import_ipc(handle, 5)
    device.memory.revoke(handle)


def test_an_exporter_that_was_never_there_is_an_error(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"^process 7, the exporter, has ended"):
        device.memory.import_ipc(replaced(device, exporter="/nowhere/ipc-7-8.sock"))


def test_the_socket_of_another_user_is_refused(device: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = handle_of(peer.run(EXPORT.format(size=4)))
    monkeypatch.setattr("rlcore.devices.ipc.importer._of_process.own", IpcImporter())  # it has no connection yet
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(
        DeviceError, match=rf"{handle.exporter} belongs to user {mine}; memory is shared .* one user, here {mine + 1}$"
    ):
        device.memory.import_ipc(handle)


def test_an_importer_of_another_user_is_refused(device: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.devices.ipc.importer._of_process.own", IpcImporter())  # it has no connection yet
    text = peer.run(EXPORT.format(size=4))
    peer.run("getuid = os.getuid; mine = getuid(); os.getuid = lambda: mine + 1")
    try:
        with pytest.raises(
            DeviceError, match=rf"^process {peer.pid}, the exporter, has ended, or refuses this process's user$"
        ):
            device.memory.import_ipc(handle_of(text))
    finally:
        peer.run("os.getuid = getuid")
    with device.memory.import_ipc(handle_of(text)) as mapping:
        assert mapping.tensor.tolist() == [0, 1, 2, 3]
    peer.run("device.memory.revoke(handle)")


def test_rubbish_on_the_socket_harms_nobody(device: Any, peer: Peer) -> None:
    import socket

    text = export(device, numbered(device, 4))
    for data in (
        b"\x80\x04\x95rubbish",
        b"\x00" * 60_000,
        msgspec.msgpack.encode({"type": "Revoke", "export_id": "x"}),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(handle_of(text).exporter)
            connection.send(data)
            assert connection.recv(1) == b""
    import_in(peer, text)
    assert peer.run("result = mapping.tensor.tolist()") == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------- bad exports


def test_what_cannot_be_exported_says_why(device: Any) -> None:
    at = device.torch_device
    for tensor, message in (
        (torch.zeros(2, device="meta"), f"this tensor is on meta; export it with that device, not {at}"),
        (torch.eye(2, device=at).to_sparse(), r"layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex64, device=at).conj(), r"conjugate True"),
        (torch.zeros(2, dtype=torch.complex64, device=at).conj().imag, r"negative True"),
        (torch.zeros(2).numpy(), r"takes a plain torch.Tensor, got ndarray"),
        (
            torch.nn.Buffer(torch.zeros(2, device=at)).as_subclass(type("Odd", (torch.Tensor,), {})),
            r"got Odd; of a DTe",
        ),
    ):
        with pytest.raises(InvalidInputError, match=message):
            device.memory.export_ipc(tensor)


def test_a_storage_resized_while_it_is_exported(device: Any, peer: Peer) -> None:
    tensor = numbered(device, 4)
    text = export(device, tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(
        PeerError, match=r"^StateError: export \w+ of process \d+ was freed or resized by its owner since"
    ):
        import_in(peer, text)
    (row,) = [row for row in device.memory.ledger() if row.export_id == handle_of(text).export_id]
    assert row.address == 0  # whatever comes to lie where it was is not exported
    again = export(device, tensor)  # nobody had it open: a new export
    assert handle_of(again).export_id != handle_of(text).export_id
    assert handle_of(text).export_id not in [row.export_id for row in device.memory.ledger()]


def test_a_storage_resized_under_an_importer(device: Any, peer: Peer) -> None:
    tensor = numbered(device, 4)
    import_in(peer, export(device, tensor))
    tensor.untyped_storage().resize_(0)  # whoever maps it must not touch it now
    with pytest.raises(StateError, match=rf"resized while process {peer.pid} had it open; call revoke\(handle\)"):
        export(device, tensor)


def test_a_full_shared_memory_is_an_error(peer: Peer, device: Any) -> None:
    if device.type != "cpu":
        pytest.skip("of the CPU's shared memory")
    before = shared_files(peer)
    peer.run(
        "import resource; sizes = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, sizes[1]))"
    )
    try:
        with pytest.raises(
            PeerError, match=r"^DeviceError: 4194304 bytes could not be moved to shared memory: .*--shm-size"
        ):
            peer.run(EXPORT.format(size=MB))
    finally:
        peer.run("resource.setrlimit(resource.RLIMIT_FSIZE, sizes)")
    peer.run("exported = [row.storage_bytes for row in device.memory.ledger()]")
    assert peer.run("result = [4 * 2**20 in exported, tensor[3].item()]") == [False, 3]
    assert shared_files(peer) == before, "torch leaves an empty file"


def shared_files(peer: Peer) -> set[Path]:
    return set(Path("/dev/shm").glob(f"torch_{peer.pid}_*"))


def test_too_few_open_files_are_an_error(peer: Peer, device: Any) -> None:
    if device.type != "cpu":
        pytest.skip("a GPU's memory has no descriptors")
    exported = device.memory.export_ipc(numbered(device, 4))
    peer.run(EXPORT.format(size=4))  # its socket is there
    import_in(peer, exported.to_bytes().hex(), "opened")
    other = device.memory.export_ipc(numbered(device, 4)).to_bytes().hex()
    peer.run(
        "import resource; files = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, files[1]))\n"
    )
    try:
        with pytest.raises(
            PeerError, match=r"^DeviceError: 16 bytes could not be moved .*Too many open files.*; raise uli"
        ):
            peer.run(EXPORT.format(size=4))
        with pytest.raises(
            PeerError, match=r"^DeviceError: no descriptor of the exporter's memory has .* of the 3 files"
        ):
            import_in(peer, other)
    finally:
        peer.run("resource.setrlimit(resource.RLIMIT_NOFILE, files)")
    import_in(peer, other)
    assert peer.run("result = mapping.tensor.tolist()") == [0, 1, 2, 3]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_runtime_folder_that_takes_no_socket_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("RLCORE_RUNTIME", str(tmp_path))
    with pytest.raises(StateError, match=r"^no socket for IPC could be made at .*; set RLCORE_RUNTIME to a writable"):
        IpcExporter().export([torch.zeros(1).untyped_storage()], "", lambda storage: None)  # type: ignore[arg-type,return-value]


def test_a_runtime_folder_may_lie_as_deep_as_it_likes(make_peer: MakePeer, tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 40)
    folder.mkdir(0o700)
    exporter, importer = (make_peer(RLCORE_RUNTIME=str(folder)) for _ in range(2))
    import_in(importer, exporter.run(EXPORT.format(size=4)))
    assert importer.run("result = mapping.tensor.tolist()") == [0, 1, 2, 3]
