"""Bytes that are no message: whatever is wrong with them, the caller's kind of error comes, and no other."""

from __future__ import annotations

import array
import io
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rlcore.decoding import decode
from rlcore.devices.ipc import messages
from rlcore.engines.weight_sync.channels.control import RemoteCall, RemoteResult
from rlcore.engines.weight_sync.endpoint import EndpointInfo, endpoint_info
from rlcore.engines.weight_sync.messages import Offer, OfferedTensor, Packing, PlanSummary, decoded
from rlcore.engines.weight_sync.planning.manifest import WeightManifest
from rlcore.errors import CollectiveError, DeviceError, InvalidInputError, SyncError
from rlcore.process.framing import read_message, write_message
from rlcore.process.tensor_channel import TensorChannel
from rlcore.registry import get_device
from rlcore.tensor_tree import FIRST_FREE_CODE, TreeEncoder, decode_tree
from rlcore.types import IpcHandle

NUM_DAMAGED = 200
TOO_DEEP = 1_000_000
"""From Python 3.14 on the stack's size is the limit, and not a number of calls."""


def deep(num_lists: int) -> bytes:
    """The msgpack of a list in a list in a list."""
    return b"\x91" * num_lists + b"\x90"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (deep(TOO_DEEP), list[Any]),
        (b"\x82\xa5field\x01\xa7unknown" + deep(TOO_DEEP), dict[str, int]),
        (b"\x81\xa7unknown" + deep(TOO_DEEP), RemoteCall),  # a field that is skipped
        (b"\x93\x00\xa1a" + deep(TOO_DEEP), tuple[int, str, msgspec.Raw]),
    ],
)
def test_lists_in_lists_are_refused_without_a_recursion_error(data: bytes, kind: Any) -> None:
    with pytest.raises(CollectiveError, match=rf"^these {len(data)} bytes are no greeting: "):
        decode(data, kind, "greeting", error=CollectiveError)


def examples() -> dict[str, tuple[Any, bytes]]:
    handle = IpcHandle(
        device="cpu",
        device_uuid="uuid",
        boot_id="boot",
        exporter="/run/ipc.sock",
        export_id="7",
        payload=b"\x01\x02",
        storage_bytes=64,
        storage_offset_bytes=0,
        dtype="float32",
        shape=(4, 4),
        stride=(4, 1),
    )
    tensor = OfferedTensor(0, 0, 0, 16, "float32")
    packing = Packing(round_id=1 << 61, digest="ab" * 32, slot_bytes=4096, bucket=3, slot=1, is_checked=True)
    summary = PlanSummary(digest="ab" * 32, needed_bytes=[4096, 12], fallback=["a.weight"], is_tested=True)
    encode = msgspec.msgpack.encode
    return {
        "call": (
            RemoteCall,
            encode(RemoteCall(7, "begin", msgspec.Raw(encode([1, "trainer", "digest", True, False])))),
        ),
        "result": (RemoteResult, encode(RemoteResult(7, "", msgspec.Raw(encode([b"info", True, True]))))),
        "endpoint": (EndpointInfo, encode(endpoint_info(get_device("cpu")))),
        "offer": (Offer, encode(Offer(epoch="e", handles=[handle], tensors=[tensor]))),
        "packings": (list[Packing], encode([packing])),
        "summary": (PlanSummary, encode(summary)),
        "handle": (IpcHandle, handle.to_bytes()),
    }


def damaged(data: bytes, seed: int) -> bytes:
    """The bytes with some bits flipped, cut off, or repeated."""
    chance = random.Random(seed)
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    match chance.randrange(4):
        case 0:
            del found[chance.randrange(len(found)) :]
        case 1:
            found += bytes(found)
    return bytes(found)


@pytest.mark.parametrize("name", examples())
def test_damaged_messages_raise_one_kind_of_error(name: str) -> None:
    kind, data = examples()[name]
    assert decoded(data, kind, name) is not None
    num_refused = 0
    for seed in range(NUM_DAMAGED):
        try:
            decoded(damaged(data, seed), kind, name)
        except SyncError as error:
            assert f"bytes are no {name}: " in str(error)
            num_refused += 1
        except InvalidInputError:  # of a handle whose numbers cannot be
            num_refused += 1
    assert num_refused > NUM_DAMAGED // 4


def test_damaged_handles_and_manifests_say_what_they_are_not() -> None:
    _, data = examples()["handle"]
    for seed in range(NUM_DAMAGED):
        try:
            IpcHandle.from_bytes(damaged(data, seed))
        except InvalidInputError as error:
            assert str(error)
    with pytest.raises(InvalidInputError, match="bytes are no IpcHandle"):
        IpcHandle.from_bytes(deep(TOO_DEEP))
    with pytest.raises(SyncError, match="bytes are no Manifest of a weight sync: containers are nested too deeply"):
        WeightManifest.from_bytes(b"\x81\xa7unknown" + deep(TOO_DEEP))


def test_a_packet_that_nests_too_deeply_closes_its_descriptor() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        there.send(b"\x82\xa4type\xa7Release\xa7unknown" + deep(60_000))
        # No longer packet passes a socket; from Python 3.14 on this one is not too deep to be skipped.
        why = "Object missing required field" if sys.version_info >= (3, 14) else "containers are nested too deeply"
        with pytest.raises(DeviceError, match=rf"bytes are no IPC message of process \d+: {why}"):
            messages.receive(here)


# ------------------------------------------------------------------------------- between a process and its child


class Greeting(msgspec.Struct):
    kind: str
    call: int


_ENCODER = TreeEncoder()
TREE = _ENCODER.encode({"a": [1, (2, "x", [torch.ones(3)])], "b": torch.ones(100_000), 3: b"123"})


def read_tree(data: bytes) -> Any:
    return decode_tree(data, _ENCODER.tensors)


def read_frame(data: bytes) -> Any:
    return read_message(io.BytesIO(len(data).to_bytes(8, "little") + data), dict[str, Any])


def framed(message: object) -> bytes:
    pipe = io.BytesIO()
    write_message(pipe, message)
    return pipe.getvalue()[8:]


class EnvelopeReader:
    """The envelope of a message with a tensor, and what another channel makes of an envelope."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        with here, there:
            channel = TensorChannel(here, Greeting)
            channel.send(Greeting("result", 3), b"body", [torch.ones(5)])
            header, ancillary, _, _ = there.recvmsg(9, 64)
            (self.descriptor,) = array.array("i", ancillary[0][2])
            self.data = there.recv(1 << 16)
            assert header[:8] == len(self.data).to_bytes(8, "little")
            channel.close()

    def read(self, data: bytes, announced: int | None = None) -> Any:
        here, there = socket.socketpair()
        with here, there:
            size = len(data) if announced is None else announced
            descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.descriptor]))]
            here.sendmsg([size.to_bytes(8, "little"), b"\x01"], descriptors)
            here.sendall(data)
            here.shutdown(socket.SHUT_WR)
            return TensorChannel(there, Greeting).receive()


@pytest.fixture
def envelope() -> Iterator[EnvelopeReader]:
    reader = EnvelopeReader()
    yield reader
    os.close(reader.descriptor)


@pytest.mark.parametrize("name", ["tree", "frame", "envelope"])
def test_what_a_child_sends_damaged_is_one_kind_of_error(name: str, envelope: EnvelopeReader) -> None:
    readers: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
        "tree": (read_tree, TREE),
        "frame": (read_frame, framed({"b": [2.5, None, "abc"], "c": Greeting("x", 1)})),
        "envelope": (envelope.read, envelope.data),
    }
    read, data = readers[name]
    assert read(data) is not None
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    num_refused = 0
    for seed in range(NUM_DAMAGED):
        try:
            read(damaged(data, seed))
        except InvalidInputError as error:
            assert str(error)
            num_refused += 1
    assert num_refused > NUM_DAMAGED // 4
    with pytest.raises(InvalidInputError, match=r"^these \d+ bytes are no "):
        read(deep(60_000))
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before, "no descriptor is left open"


def test_a_size_for_which_there_is_no_memory_is_an_error_of_the_message(envelope: EnvelopeReader) -> None:
    with pytest.raises(InvalidInputError, match="a message of 18446744073709551615 bytes is announced"):
        envelope.read(b"abc", announced=(1 << 64) - 1)
    with pytest.raises(InvalidInputError, match="a message of 18446744073709551615 bytes is announced"):
        read_message(io.BytesIO(b"\xff" * 8 + b"abc"))


def test_extensions_in_extensions_are_refused_without_a_recursion_error() -> None:
    data = b"\x90"
    for _ in range(2000):
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(3, data))
    with pytest.raises(InvalidInputError, match=r"^these \d+ bytes are no tree: ") as caught:
        decode_tree(data, [])
    assert len(str(caught.value)) < 200, "one level tells it"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (msgspec.msgpack.Ext(1, (2).to_bytes(4, "little")), "it refers to tensor 2 of 1"),
        (msgspec.msgpack.Ext(1, (0).to_bytes(4, "little")), "it refers to tensor 0 of 1"),
        (msgspec.msgpack.Ext(99, b"\x90"), "it has an extension of code 99"),
        (msgspec.msgpack.Ext(2, msgspec.msgpack.encode(("no_dtype", (1,), b"1234"))), "are no no_dtype of shape (1,)"),
        (msgspec.msgpack.Ext(2, msgspec.msgpack.encode(("float32", (-1,), b"1234"))), "are no float32 of shape (-1,)"),
        (msgspec.msgpack.Ext(2, msgspec.msgpack.encode(("float32", (2,), b"1234"))), "are no float32 of shape (2,)"),
    ],
)  # fmt: skip
def test_a_tree_says_what_is_wrong_with_it(data: msgspec.msgpack.Ext, reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        decode_tree(msgspec.msgpack.encode([data]), [torch.ones(1)])
    assert reason in str(caught.value)


def test_an_error_of_what_a_tree_calls_is_not_called_damage() -> None:
    def fails(content: Any) -> Any:
        raise ImportError("no module of that name")

    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(FIRST_FREE_CODE, b"\x90"))
    with pytest.raises(ImportError, match="no module of that name"):
        decode_tree(data, [], {FIRST_FREE_CODE: fails})
