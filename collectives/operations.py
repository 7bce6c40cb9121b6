"""The collective operations of a group: tensors of any dtype are moved as bytes, and reduced as their device can."""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.arguments import BYTES, LIST, NUMBER, Kind, optional, takes
from rlcore.collectives._torch_private import premul_sum
from rlcore.collectives.reduction import fold, scaled
from rlcore.collectives.tree import why_not_plain
from rlcore.device import Device
from rlcore.errors import CollectiveError, InvalidInputError, UnsupportedError
from rlcore.tensor_data import dtype_name, flat_bytes

_INLINE_BYTES = 1024
"""``exchange`` sends so many bytes in its first message; longer data takes a second one."""

# Renamed in torch 2.13.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_SIZES = Kind(
    "a list of whole numbers of at least 0",
    lambda sizes: LIST.has(sizes) and all(type(rows) is int and rows >= 0 for rows in sizes),
)
_SECONDS = Kind("more than 0 seconds", lambda seconds: NUMBER.has(seconds) and 0 < seconds < math.inf)


F = TypeVar("F", bound=Callable[..., Any])


def operation(**kinds: Kind) -> Callable[[F], F]:
    """Decorate an operation of all ranks, with the kinds of its arguments: the others are told of what it raises."""

    def decorate(method: F) -> F:
        checked = takes(**kinds)(method)

        @functools.wraps(checked)
        def operation(self: Operations, *arguments: Any, **options: Any) -> Any:
            with self._operation(method.__name__):
                return checked(self, *arguments, **options)

        return operation  # type: ignore[return-value]

    return decorate


class Operations(ABC):
    """The operations of a ``Group``. All ranks call each, in the same order.

    Those on host tensors end before they return. Those on device tensors are queued on the current stream.
    A wrong argument is refused before anything is sent. Where all ranks refuse an operation the group goes on; a rank
    that refuses it alone is named to those that wait for it.

    Gloo ends a process where ranks give different shapes, and computes wrong values from different dtypes or operators.
    So the ranks compare the first call of each operation on host tensors, and under ``RLCORE_DEBUG=1``, of any rank,
    every call. Where calls differ all ranks raise the same ``CollectiveError``, nothing is sent, and the group goes on.
    """

    device: Device
    rank: int
    world_size: int
    name: str
    _host: Device
    """The host as a device."""
    _is_debugging: bool
    """True on all ranks if one of them is."""
    _agreed: set[str]
    """Operations of which a call was compared."""

    @abstractmethod
    def _run(
        self,
        what: str,
        tensor: Tensor,
        start: Callable[[Any], Any],
        *,
        peer: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start work on the torch group that serves ``tensor``, with one ``peer`` or all, and wait for it."""

    @abstractmethod
    def _operation(self, what: str, among: str = "all") -> AbstractContextManager[None]:
        """Return the context of one operation of the ranks ``among``, who are told of what is raised in it."""

    @operation(factor=optional(NUMBER))
    def all_reduce(self, tensor: Tensor, op: str = "sum", *, factor: float | None = None) -> Tensor:
        """Reduce over all ranks, in place.

        Args:
            tensor: any shape, the same on all ranks; of ``device.collectives.dtypes()``.
            op: of ``device.collectives.reduce_ops()``.
            factor: for op "premul_sum", by which this rank's values are multiplied first.

        Raises:
            UnsupportedError: the operator has no meaning for the dtype.
        """
        flat = values = self._flat(tensor, "all_reduce")
        how = self._reduction(flat, op, factor)
        self._compare("all_reduce", tensor, f", op {op!r}")
        if how == "emulated" and factor is not None:
            values, op, factor = scaled(flat, factor), "sum", None
            how = self._reduction(values, op, factor)
        if how == "native":
            torch_op = _torch_op(op, factor)
            self._run("all_reduce", values, lambda g: dist.all_reduce(values, torch_op, group=g, async_op=True))
        else:
            rows = _rows_of_ranks(flat.numel(), self.world_size)
            values = self._gathered(self._reduced(values, rows, op), rows)
        if values is not flat:
            flat.copy_(values)
        return _written(tensor, flat)

    @operation(factor=optional(NUMBER), sizes=optional(_SIZES))
    def reduce_scatter(
        self, tensor: Tensor, op: str = "sum", *, sizes: Sequence[int] | None = None, factor: float | None = None
    ) -> Tensor:
        """Reduce over all ranks; each keeps its rows.

        Args:
            tensor: [n, ...], the same shape on all ranks.
            sizes: rows of each rank; by default n / world_size, the first ranks having one more where it is uneven.

        Returns:
            [sizes[rank], ...], new.
        """
        values = self._dense(tensor, "reduce_scatter")
        rows = _rows_of_ranks(values.shape[0], self.world_size) if sizes is None else self._checked(sizes, values)
        how = self._reduction(values, op, factor)
        self._compare("reduce_scatter", values, f", op {op!r}, sizes {rows}")
        if factor is not None and (how == "emulated" or len(set(rows)) > 1):
            values, op, factor = scaled(values, factor), "sum", None
            how = self._reduction(values, op, factor)
        if how == "emulated" or len(set(rows)) > 1:
            return self._reduced(values, rows, op)
        out = values.new_empty((rows[self.rank], *values.shape[1:]))
        torch_op = _torch_op(op, factor)
        start = lambda g: _reduce_scatter_single(out, values, torch_op, group=g, async_op=True)  # noqa: E731
        self._run("reduce_scatter", values, start)
        return out

    @operation(sizes=optional(_SIZES))
    def all_gather(self, tensor: Tensor, *, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, as views of one new tensor.

        Args:
            tensor: [n, ...] of any dtype; n may differ between ranks.
            sizes: n of each rank, where they are known; saves their exchange.

        Raises:
            CollectiveError: on all ranks, where dtypes or the other dimensions differ.
        """
        values = self._dense(tensor, "all_gather")
        if sizes is None:
            sizes = [rows for (rows,) in self._agree("all_gather", _rows_of(values), [values.shape[0]])]
        elif len(sizes) != self.world_size or sizes[self.rank] != values.shape[0]:
            raise InvalidInputError(
                f"sizes of all_gather must be the rows of each of {self.world_size} ranks, {values.shape[0]} on this "
                f"rank {self.rank}; got {sizes!r}"
            )
        elif self._is_to_compare("all_gather", values):
            self._agree("all_gather", f"{_rows_of(values)}, sizes {list(sizes)}")
        return list(torch.split(self._gathered(values, sizes), list(sizes)))

    @operation()
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite ``tensor`` with that of rank ``source``, of the same shape and dtype."""
        self._check_rank(source, "source")
        flat = self._flat(tensor, "broadcast")
        self._compare("broadcast", tensor, f", source {source}")
        self._sent_to_all(flat, source)
        return _written(tensor, flat)

    @operation(tensors=LIST, sizes=optional(_SIZES))
    def all_to_all(self, tensors: Sequence[Tensor], *, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Send ``tensors[r]`` to rank r; returns what the ranks sent here, by rank, as views of one new tensor.

        Args:
            tensors: one for each rank, [n_r, ...] of one dtype; n_r may differ.
            sizes: rows that each rank sends here, where they are known; saves their exchange.

        Raises:
            CollectiveError: on all ranks, where dtypes or the other dimensions differ.
        """
        if len(tensors) != self.world_size:
            raise InvalidInputError(f"all_to_all of {self!r} takes a tensor for each rank, got {len(tensors)}")
        parts = [self._dense(tensor, "all_to_all") for tensor in tensors]
        if len({(part.dtype, part.shape[1:], part.device) for part in parts}) > 1:
            raise InvalidInputError(
                f"all_to_all of {self!r}: the tensors must have one dtype, device and row shape; got "
                f"{', '.join(f'{dtype_name(part.dtype)} {tuple(part.shape)} on {part.device}' for part in parts)}"
            )
        if sizes is None:
            rows_by_rank = self._agree("all_to_all", _rows_of(parts[0]), [part.shape[0] for part in parts])
            sizes = [rows[self.rank] for rows in rows_by_rank]
        elif len(sizes) != self.world_size or sizes[self.rank] != parts[self.rank].shape[0]:
            raise InvalidInputError(
                f"sizes of all_to_all must be the rows that each of {self.world_size} ranks sends to this rank "
                f"{self.rank}, {parts[self.rank].shape[0]} of its own; got {sizes!r}"
            )
        elif self._is_to_compare("all_to_all", parts[0]):
            self._compare_sizes(self._agree("all_to_all", _rows_of(parts[0]), [*(p.shape[0] for p in parts), *sizes]))
        return list(torch.split(self._sent_here(parts, sizes), list(sizes)))

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to ``recv`` on rank ``destination``."""
        self._check_rank(destination, "destination", is_other=True)
        what = f"send to rank {destination}"
        with self._operation(what, f"{self.rank}-{destination}"):
            data = flat_bytes(self._flat(tensor, "send"))
            self._compare_with_peer(what, tensor, self.rank, destination)
            start = lambda g: dist.isend(data, group_dst=destination, group=g)  # noqa: E731
            self._run(what, data, start, peer=destination)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite ``tensor`` with what rank ``source`` sends, of the same shape and dtype."""
        self._check_rank(source, "source", is_other=True)
        what = f"recv from rank {source}"
        with self._operation(what, f"{source}-{self.rank}"):
            flat = self._flat(tensor, "recv")
            data = flat_bytes(flat)
            self._compare_with_peer(what, tensor, source, self.rank)
            start = lambda g: dist.irecv(data, group_src=source, group=g)  # noqa: E731
            self._run(what, data, start, peer=source)
            return _written(tensor, flat)

    @operation(timeout_s=optional(_SECONDS))
    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here and what they have queued on their devices is done.

        Raises:
            CollectiveTimeoutError: naming the ranks that did not come in time.
        """
        self.device.synchronize()
        if self._is_debugging:
            self._agree("barrier", "", timeout_s=timeout_s)
        here = torch.zeros(1)
        self._run("barrier", here, lambda g: dist.all_reduce(here, group=g, async_op=True), timeout_s=timeout_s)

    @operation(data=BYTES)
    def exchange(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank: an all-gather through the host, one message if all are short."""
        if self._is_debugging:
            self._agree("exchange", "")
        return self._exchanged(data, "exchange")

    # ---------------------------------------------------------------------------------------- movements

    def _exchanged(self, data: bytes, what: str, timeout_s: float | None = None) -> list[bytes]:
        own, head = _message(data)
        heads = self._gathered(head, [head.numel()] * self.world_size, what, timeout_s).numpy().tobytes()
        parts = [heads[start : start + head.numel()] for start in range(0, len(heads), head.numel())]
        lengths = [int.from_bytes(part[:8], "little") for part in parts]
        if max(lengths) > _INLINE_BYTES:
            sizes = [8 + length for length in lengths]
            parts = [part.numpy().tobytes() for part in torch.split(self._gathered(own, sizes, what), sizes)]
        return [part[8 : 8 + length] for part, length in zip(parts, lengths, strict=True)]

    def _sent_to_all(self, flat: Tensor, source: int) -> None:
        data = flat_bytes(flat)
        self._run("broadcast", flat, lambda g: dist.broadcast(data, group_src=source, group=g, async_op=True))

    def _gathered(
        self, values: Tensor, sizes: Sequence[int], what: str = "all_gather", timeout_s: float | None = None
    ) -> Tensor:
        """Return [sum(sizes), ...]: the rows of all ranks."""
        out = values.new_empty((sum(sizes), *values.shape[1:]))
        if len(set(sizes)) == 1:
            whole, own = flat_bytes(out), flat_bytes(values)
            start = lambda g: _all_gather_single(whole, own, group=g, async_op=True)  # noqa: E731
            self._run(what, values, start, timeout_s=timeout_s)
            return out
        # Libraries gather equal parts only; padding to the largest could take world_size times the memory.
        parts = torch.split(out, list(sizes))
        parts[self.rank].copy_(values)
        for source, part in enumerate(parts):
            if part.numel():
                self._sent_to_all(part, source)
        return out

    def _sent_here(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Return [sum(sizes), ...]: the rows that all ranks sent here."""
        data = torch.cat([flat_bytes(part) for part in parts])
        out = parts[0].new_empty((sum(sizes), *parts[0].shape[1:]))
        row_bytes = out.element_size() * out.shape[1:].numel()
        received, arriving, leaving = flat_bytes(out), [rows * row_bytes for rows in sizes], [_nbytes(p) for p in parts]
        start = lambda g: dist.all_to_all_single(received, data, arriving, leaving, group=g, async_op=True)  # noqa: E731
        self._run("all_to_all", data, start)
        return out

    def _reduced(self, values: Tensor, rows: Sequence[int], op: str) -> Tensor:
        """Return [rows[rank], ...]: this rank's rows, reduced over all ranks."""
        own = rows[self.rank]
        parts = self._sent_here(torch.split(values, list(rows)), [own] * self.world_size)
        return fold(parts.view(self.world_size, own * values.shape[1:].numel()), op).view(own, *values.shape[1:])

    # ------------------------------------------------------------------------------------------ checks

    def _reduction(self, values: Tensor, op: str, factor: float | None) -> str:
        """Return "native" or "emulated"."""
        if (op == "premul_sum") != (factor is not None):
            raise InvalidInputError(f"op 'premul_sum' takes a factor, and no other does; got {op!r} and {factor!r}")
        device = self._host if self._is_on_host(values) else self.device
        how = device.collectives.reduction(op, values.dtype)
        if how.support == "unsupported":
            raise UnsupportedError(f"{op} of {dtype_name(values.dtype)} over {self!r}", how.reason)
        return str(how.support)

    def _is_to_compare(self, what: str, values: Tensor) -> bool:
        """Return True if the ranks are to compare this call: all of them come to the same answer."""
        if what in self._agreed or not self._is_on_host(values):
            return self._is_debugging
        return self._is_debugging or self._host.collectives.backend == "gloo"

    def _compare(self, what: str, values: Tensor, arguments: str) -> None:
        """Compare a call whose tensors are alike on all ranks."""
        if self._is_to_compare(what, values):
            self._agree(what, f"{_kind_of(values)}{arguments}")

    def _agree(
        self, what: str, call: str, rows: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> list[list[int]]:
        """Return ``rows`` of all ranks after a check that their calls are the same."""
        calls = [
            msgspec.msgpack.decode(data)
            for data in self._exchanged(msgspec.msgpack.encode((f"{what} {call}".rstrip(), rows)), what, timeout_s)
        ]
        if len({call for call, _ in calls}) > 1:
            listed = "; ".join(f"rank {rank} calls {name}" for rank, (name, _) in enumerate(calls))
            raise CollectiveError(f"{what} of group {self.name!r}: all ranks must call the same; {listed}")
        self._agreed.add(what)
        return [rank_rows for _, rank_rows in calls]

    def _compare_sizes(self, rows_by_rank: list[list[int]]) -> None:
        """Compare the rows that each rank sends to each other, and those that the other expects."""
        for source, destination in itertools.product(range(self.world_size), repeat=2):
            sent, expected = rows_by_rank[source][destination], rows_by_rank[destination][self.world_size + source]
            if sent != expected:
                raise CollectiveError(
                    f"all_to_all of group {self.name!r}: rank {source} sends {sent} rows to rank {destination}, whose "
                    f"sizes say {expected}"
                )

    def _compare_with_peer(self, what: str, tensor: Tensor, source: int, destination: int) -> None:
        """Compare a send with its receive, by a message each way."""
        pair = f"send from rank {source} to rank {destination}"
        if not self._is_to_compare(pair, tensor):
            return
        peer = destination if source == self.rank else source
        call = _kind_of(tensor)[:_INLINE_BYTES]
        _, own = _message(call.encode())
        theirs = torch.empty_like(own)
        steps: list[Callable[[Any], Any]] = [
            lambda g: dist.isend(own, group_dst=peer, group=g),
            lambda g: dist.irecv(theirs, group_src=peer, group=g),
        ]
        for start in steps if source == self.rank else reversed(steps):
            self._run(what, own, start, peer=peer)
        length = int.from_bytes(theirs[:8].numpy().tobytes(), "little")
        their_call = theirs[8 : 8 + length].numpy().tobytes().decode()
        if their_call != call:
            listed = "; ".join(
                f"rank {rank} has {kind}" for rank, kind in sorted({self.rank: call[3:], peer: their_call[3:]}.items())
            )
            raise CollectiveError(f"{pair} of group {self.name!r}: both must have tensors of one kind; {listed}")
        self._agreed.add(pair)

    def _checked(self, sizes: Sequence[int], values: Tensor) -> list[int]:
        if len(sizes) != self.world_size or sum(sizes) != values.shape[0]:
            raise InvalidInputError(
                f"sizes of reduce_scatter must be the rows of each of {self.world_size} ranks, {values.shape[0]} in "
                f"all; got {sizes!r}"
            )
        return list(sizes)

    def _check_rank(self, rank: int, what: str, *, is_other: bool = False) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size or (is_other and rank == self.rank):
            other = " and not its own" if is_other else ""
            raise InvalidInputError(f"{what} must be a rank of {self!r}{other}, got {rank!r}")

    def _dense(self, tensor: Tensor, what: str) -> Tensor:
        """Return ``tensor`` contiguous and without autograd; it must have a first dimension."""
        values = self._contiguous(tensor, what)
        if values.dim() == 0:
            raise InvalidInputError(f"{what} of {self!r} takes tensors of at least one dimension; give x.reshape(1)")
        return values

    def _flat(self, tensor: Tensor, what: str) -> Tensor:
        return self._contiguous(tensor, what).view(-1)

    def _contiguous(self, tensor: Tensor, what: str) -> Tensor:
        if other := why_not_plain(tensor):
            raise InvalidInputError(f"{what} of {self!r} takes plain dense tensors, got {other}")
        if tensor.device not in (self.device.torch_device, self._host.torch_device):
            raise InvalidInputError(
                f"{what} of {self!r} takes tensors on {self.device.torch_device} or on the host, got {tensor.device}"
            )
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def _is_on_host(self, tensor: Tensor) -> bool:
        return bool(tensor.device == self._host.torch_device)


def _torch_op(op: str, factor: float | None) -> Any:
    return getattr(dist.ReduceOp, op.upper()) if factor is None else premul_sum(factor)


def _written(tensor: Tensor, flat: Tensor) -> Tensor:
    """Return ``tensor`` with the values of ``flat``, which shares its memory unless it had to be copied."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _kind_of(values: Tensor) -> str:
    return f"of {dtype_name(values.dtype)} {tuple(values.shape)} on {values.device.type}"


def _rows_of(values: Tensor) -> str:
    return f"of {dtype_name(values.dtype)} rows of {tuple(values.shape[1:])} on {values.device.type}"


def _message(data: bytes) -> tuple[Tensor, Tensor]:
    """Return ``data`` behind its length, and the first part of that, which has one length on all ranks."""
    whole = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)
    head = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
    head[: whole.numel()] = whole[: head.numel()]
    return whole, head


def _nbytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


def _rows_of_ranks(rows: int, world_size: int) -> list[int]:
    least, more = divmod(rows, world_size)
    return [least + (rank < more) for rank in range(world_size)]
