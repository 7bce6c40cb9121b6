"""Weight syncs over a control channel that loses, repeats, reorders, damages and makes up messages.

Sender and receiver are those of a framework without engines (``WeightSender``, ``WeightReceiver``), in two threads.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

import rlcore
from rlcore.chaos.checks import ViolationError, error_text, require
from rlcore.engines.weight_sync.channels.control import RemoteCall
from rlcore.errors import RlcoreError, SyncError

_SHAPES = {"0.weight": (30, 40), "0.bias": (30,), "1.weight": (3, 30)}
_LATE_S = 1.0
_STEPS_OF_A_ROUND = 12
_NUM_ROUNDS = 6
_STAGING_BYTES = 1024  # several buckets
_END = b"end"

Deliver = Callable[[bytes], None]


class ChannelEnd:
    """One end of a channel in memory; ``meddle`` decides what of a message is delivered."""

    def __init__(self, inbox: queue.SimpleQueue[bytes], outbox: queue.SimpleQueue[bytes]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.last: dict[str, list[Any]] = {}
        """The arguments of the last call of each method that this end sent."""
        self.meddle: Callable[[bytes, Deliver], None] = lambda data, deliver: deliver(data)

    def send(self, data: bytes) -> None:
        message = msgspec.msgpack.decode(data)
        if "method" in message:
            self.last[message["method"]] = message["arguments"]
        self.meddle(data, self._outbox.put)

    def recv(self, timeout_s: float) -> bytes:
        try:
            data = self._inbox.get(timeout=max(timeout_s, 1e-3))
        except queue.Empty:
            raise TimeoutError from None
        if data == _END:
            raise ConnectionError("the program ends")
        return data


class Mischief:
    """Meddles with one message of a round that goes to the receiver."""

    def __init__(self, kind: str, end: ChannelEnd, draw: random.Random) -> None:
        self.kind, self._end, self._draw = kind, end, draw
        self.place = draw.randrange(_STEPS_OF_A_ROUND)
        self._seen = 0
        self._held: bytes | None = None

    def __call__(self, data: bytes, deliver: Deliver) -> None:
        self._seen += 1
        held, self._held = self._held, None
        if self._seen == self.place + 1:
            MISCHIEF[self.kind](self, data, deliver)
        else:
            deliver(data)
        if held is not None:
            deliver(held)

    def lose(self, data: bytes, deliver: Deliver) -> None:
        pass

    def repeat(self, data: bytes, deliver: Deliver) -> None:
        deliver(data)
        deliver(data)

    def reorder(self, data: bytes, deliver: Deliver) -> None:
        self._held = data

    def flip_bit(self, data: bytes, deliver: Deliver) -> None:
        changed = bytearray(data)
        changed[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        deliver(bytes(changed))

    def send_garbage(self, data: bytes, deliver: Deliver) -> None:
        deliver(self._draw.randbytes(self._draw.randrange(1, 200)))
        deliver(data)

    def send_nested(self, data: bytes, deliver: Deliver) -> None:
        """Send a list in a list, and so on, deeper than a decoder may follow."""
        nested = b"\x91" * self._draw.choice([1_500, 100_000]) + b"\x90"
        call = msgspec.msgpack.encode(RemoteCall(1, "describe", msgspec.Raw(nested)))
        deliver(self._draw.choice([nested, call]))
        deliver(data)

    def commit_early(self, data: bytes, deliver: Deliver) -> None:
        """Send the last round's commit, with the number of this one."""
        arguments = [self._end.last["begin"][0], *self._end.last["commit"][1:]]
        deliver(msgspec.msgpack.encode(RemoteCall(1, "commit", msgspec.Raw(msgspec.msgpack.encode(arguments)))))
        deliver(data)


MISCHIEF: dict[str, Callable[[Mischief, bytes, Deliver], None]] = {
    "lost_message": Mischief.lose,
    "repeated_message": Mischief.repeat,
    "reordered_messages": Mischief.reorder,
    "flipped_bit_of_message": Mischief.flip_bit,
    "garbage_message": Mischief.send_garbage,
    "nested_message": Mischief.send_nested,
    "early_commit": Mischief.commit_early,
}


class _Receiving(threading.Thread):
    """The receiver's program: it receives for ever, and notes what it was not promised."""

    def __init__(self, control: ChannelEnd) -> None:
        super().__init__(name="chaos-receiver", daemon=True)
        self.model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 3, bias=False))
        self.receiver = rlcore.WeightReceiver(self.model, control)
        self.known = {0.0}
        self.problem = ""
        self.is_ending = False
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)

    def run(self) -> None:
        while not self.problem and not self.is_ending:
            try:
                self.receiver.receive(timeout_s=_LATE_S)
            except SyncError as error:
                says_whole = "are whole" in error_text(error)
                if not says_whole and "are a mixture" not in error_text(error):
                    self.problem = f"receive() does not say whether the weights are whole: {error}"
                elif says_whole != self.receiver.is_whole:
                    self.problem = f"is_whole is {self.receiver.is_whole}, and receive() said: {error}"
            except BaseException as error:
                self.problem = f"receive() raised {type(error).__name__}: {error}"
            self._look()

    def _look(self) -> None:
        found = {value for parameter in self.model.parameters() for value in parameter.flatten().tolist()}
        if self.receiver.is_whole and (len(found) > 1 or not found <= self.known):
            self.problem = f"the receiver says that it is whole, and holds values of the versions {sorted(found)}"


def run_rounds(kind: str, draw: random.Random) -> None:
    """Run rounds with mischief of one kind (none for ""), and after each one without."""
    to_receiver: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    to_sender: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    own, other = ChannelEnd(to_sender, to_receiver), ChannelEnd(to_receiver, to_sender)
    receiving = _Receiving(other)
    given: dict[str, Tensor] = {name: torch.zeros(shape) for name, shape in _SHAPES.items()}
    sender = rlcore.WeightSender(given, own)
    receiving.start()
    try:
        _send_until_whole(sender, given, 0.5, receiving)
        for number in range(1, 2 * _NUM_ROUNDS, 2):
            if kind:
                own.meddle = Mischief(kind, own, draw)
            _send(sender, given, float(number), receiving, is_meddled=bool(kind))
            own.meddle = lambda data, deliver: deliver(data)
            _send_until_whole(sender, given, float(number + 1), receiving)
    finally:
        receiving.is_ending = True
        to_receiver.put(_END)
        receiving.join(30)
        sender.close()
    receiving.receiver.close()
    require(not receiving.problem, receiving.problem)


def _send(sender: Any, given: dict[str, Tensor], value: float, receiving: _Receiving, *, is_meddled: bool) -> bool:
    for tensor in given.values():
        tensor.fill_(value)
    receiving.known.add(value)
    try:
        sender.send(route="packed", staging_bytes=_STAGING_BYTES, timeout_s=_LATE_S if is_meddled else 20.0)
    except RlcoreError as error:
        require(str(error).strip(), f"send() raised {type(error).__name__} without a text")
        return False
    except Exception as error:
        raise ViolationError(f"send() raised {type(error).__name__}: {error}") from error
    finally:
        require(not receiving.problem, receiving.problem)
    return True


def _send_until_whole(sender: Any, given: dict[str, Tensor], value: float, receiving: _Receiving) -> None:
    """Send again: what was lost or made up may cost the next rounds too, but not many."""
    for _ in range(4):
        if _send(sender, given, value, receiving, is_meddled=False):
            return
    raise ViolationError("four rounds failed after messages were delivered again as they were sent")
