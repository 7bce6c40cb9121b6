"""The messages between the user's program and the agent of a host. Ray carries them as plain bytes.

The program's calls are pickled, as those of a child process are; an agent hands them on to its workers as they came.
What comes back is msgpack of the types here, and an answer is decoded by the program alone.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from rlcore.decoding import decode
from rlcore.engines.launchers.failures import WorkerFailure
from rlcore.errors import InvalidInputError
from rlcore.tensor_data import dtype_name, host_bytes
from rlcore.tensor_tree import new_tensor, viewed_as

PIECE_BYTES = 1 << 30

T = TypeVar("T")


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that an agent tells about its host, before it starts anything."""

    pid: int
    machine: str
    """Boot id and pid namespace: who shares both can end this agent."""
    rlcore_version: str
    has_token: bool
    """The cluster lets nobody in who does not have its token."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the process of a worker."""

    engine: str
    number: int
    rank: int
    world_size: int
    devices: tuple[str, ...]
    """As the program names them, with the host."""
    on_this_host: list[str]
    """The devices of all workers of the engine on this host, as they are called there."""
    owns_process: bool
    python: str
    environment: dict[str, str]
    """Variables of the program that the process is to have."""
    interface: str
    """Address of the network interface for collective libraries; "" is the loopback interface."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``Opening``."""

    process: int
    """The agent's number of the process."""
    worker: int
    """The number of the worker in its process."""
    pid: int
    name: str
    """The ``process_name`` of the process."""
    local_name: str
    """``WorkerContext.local_name``."""


class Posted(msgspec.Struct, array_like=True, frozen=True):
    """A message of the program to a worker process."""

    kind: Literal["start", "call", "close", "cancel", "forget"]
    process: int
    worker: int = 0
    call: int = 0
    """The program's number of the call."""
    method: str = ""
    body: bytes = b""
    tensors: list[tuple[str, tuple[int, ...], int]] = []
    """Dtype and shape of each tensor, and the place of its bytes among those that come beside the batch."""


class PostedBatch(msgspec.Struct, array_like=True, frozen=True):
    """The messages that one message of Ray carries to an agent."""

    order: int
    """Ray may deliver in another order: batches are taken by these numbers, without a gap."""
    messages: list[Posted]


class PlainTensor(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of an answer."""

    dtype: str
    shape: tuple[int, ...]
    data: list[memoryview]
    """Its bytes, in pieces: msgpack has none of 4 GiB."""


class Said(msgspec.Struct, array_like=True, frozen=True):
    """A message of an agent: of a call, a line that a worker has printed, or that a process has ended."""

    kind: Literal["start", "call", "cancel", "close", "end", "result", "event", "error", "line", "ended"]
    process: int
    call: int = 0
    body: bytes = b""
    tensors: list[PlainTensor] = []


class AgentAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The answer to a question that the program asked of an agent: a value, or an error."""

    value: bytes = b""
    failure: WorkerFailure | None = None


def encoded(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def decoded(data: bytes | memoryview, kind: type[T], what: str) -> T:
    """Return a message; raises InvalidInputError for bytes that are none."""
    found: T = decode(data, kind, what, error=InvalidInputError)
    return found


def contiguous(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors with their values one after the other in memory; most are already."""
    return [one.detach().resolve_conj().resolve_neg().contiguous() for one in tensors]


def plain_tensor(tensor: Tensor) -> PlainTensor:
    """Return a contiguous tensor for a message, without a copy: who encodes the message keeps the tensor until then."""
    data = host_bytes(tensor).cast("B")
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    return PlainTensor(dtype_name(tensor.dtype), tuple(tensor.shape), pieces)


def tensor_of(plain: PlainTensor) -> Tensor:
    """Return the tensor, in memory of its own.

    Raises:
        InvalidInputError: its dtype, shape and bytes do not fit each other.
    """
    if len(plain.data) <= 1:
        return new_tensor(plain.dtype, plain.shape, plain.data[0] if plain.data else b"")
    joined = torch.empty(sum(map(len, plain.data)), dtype=torch.uint8)
    memory, at = host_bytes(joined).cast("B"), 0
    for piece in plain.data:
        memory[at : at + len(piece)] = piece
        at += len(piece)
    return viewed_as(joined, plain.dtype, plain.shape)


def viewed(dtype: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
    """Return a tensor over bytes that are only read."""
    kind: Any = getattr(torch, dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return flat.view(kind).view(shape)
