"""Sender and receiver take only the messages that they expect, whatever the channel brings."""

from __future__ import annotations

import queue
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import rlcore
from rlcore.errors import InvalidInputError, SyncError


class QueueControl:
    """One end of a channel within a process; it may bring all that it is sent several times."""

    def __init__(self, out: queue.Queue[bytes], back: queue.Queue[bytes], *, times: int = 1) -> None:
        self._out, self._back = out, back
        self._times = times

    def send(self, data: bytes) -> None:
        for _ in range(self._times):
            self._out.put(data)

    def recv(self, timeout_s: float) -> bytes:
        try:
            return self._back.get(timeout=max(0.01, timeout_s))
        except queue.Empty as error:
            raise TimeoutError from error


def ends(*, times_answered: int = 1) -> tuple[QueueControl, QueueControl]:
    """The sender's, and the receiver's."""
    requests: queue.Queue[bytes] = queue.Queue()
    answers: queue.Queue[bytes] = queue.Queue()
    return QueueControl(requests, answers), QueueControl(answers, requests, times=times_answered)


def test_an_answer_that_came_before_is_not_taken_for_another_question() -> None:
    here, there = ends(times_answered=2)
    given = {"weight": torch.full((3, 5), 2.0), "bias": torch.full((3,), 4.0)}
    model = nn.Linear(5, 3)
    sender, receiver = rlcore.WeightSender(given, here), rlcore.WeightReceiver(model, there)
    with ThreadPoolExecutor(1) as pool:
        for version in (1, 2):
            received = pool.submit(receiver.receive, 60.0)
            assert sender.send(version=version, timeout_s=60.0).version == version
            assert received.result() == version
            assert bool((model.weight == given["weight"]).all()) and bool((model.bias == given["bias"]).all())
            given["weight"].fill_(7.0)
    sender.close()
    receiver.close()


def test_a_sender_takes_the_former_name_of_staging_bytes() -> None:
    here, there = ends()
    sender = rlcore.WeightSender({"weight": torch.ones(3, 5), "bias": torch.ones(3)}, here)
    receiver = rlcore.WeightReceiver(nn.Linear(5, 3), there)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receiver.receive, 60.0)
        with pytest.warns(DeprecationWarning, match="slab_bytes is called staging_bytes now") as caught:
            assert sender.send(slab_bytes=4096, route="packed", timeout_s=60.0).route == "packed"
        assert received.result() == 1
    assert caught[0].filename == __file__
    with pytest.raises(InvalidInputError, match="a staging buffer must be a multiple of 512 bytes"):
        sender.send(staging_bytes=1000)
    sender.close()
    receiver.close()


class RecordingControl(QueueControl):
    """Keeps all that it is sent."""

    def __init__(self, out: queue.Queue[bytes], back: queue.Queue[bytes]) -> None:
        super().__init__(out, back)
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        super().send(data)


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_round_that_has_ended_is_not_begun_again(num_rounds: int) -> None:
    """Its messages come again while the trainer is within a step, so that its memory holds two versions."""
    requests: queue.Queue[bytes] = queue.Queue()
    answers: queue.Queue[bytes] = queue.Queue()
    here, there = RecordingControl(requests, answers), QueueControl(answers, requests)
    given = {"weight": torch.full((3, 5), 1.0), "bias": torch.full((3,), 1.0)}
    model = nn.Linear(5, 3)
    sender, receiver = rlcore.WeightSender(given, here), rlcore.WeightReceiver(model, there)
    with ThreadPoolExecutor(1) as pool:
        for version in range(1, num_rounds + 1):
            received = pool.submit(receiver.receive, 60.0)
            sender.send(version=version, timeout_s=60.0)
            assert received.result() == version
            if version == 1:
                first_round = list(here.sent)
    given["weight"].fill_(9.0)
    for data in first_round:
        requests.put(data)
    with pytest.raises(SyncError, match=r"nothing came from the sender .* The model's weights are whole"):
        receiver.receive(timeout_s=0.5)
    while not answers.empty():
        answer = msgspec.msgpack.decode(answers.get())
    assert "a message of weight sync" in answer["error"], "its commit"
    assert receiver.is_whole and bool((model.weight == 1.0).all()) and bool((model.bias == 1.0).all())
    sender.close()
    receiver.close()


STRANGE = ["close", "reloaded", "__class__", "_drop_round", "no_such_method"]


def test_a_receiver_answers_what_the_protocol_has_and_nothing_else() -> None:
    here, there = ends()
    receiver = rlcore.WeightReceiver(nn.Linear(5, 3), there)
    for number, method in enumerate([*STRANGE, "describe"]):
        here.send(msgspec.msgpack.encode({"number": number, "method": method, "arguments": []}))
    with pytest.raises(SyncError, match="nothing came from the sender"):
        receiver.receive(timeout_s=2.0)  # the six are there
    *refused, described = (msgspec.msgpack.decode(here.recv(1)) for _ in range(len(STRANGE) + 1))
    for number, (method, answer) in enumerate(zip(STRANGE, refused, strict=True)):
        expected: dict[str, Any] = {
            "number": number,
            "error": f"SyncError: a receiver has no {method!r}",
            "result": None,
            "asks": None,
        }
        assert answer == expected
    assert (described["number"], described["error"]) == (len(STRANGE), "")


class DamagingControl(QueueControl):
    """Flips a bit of one message that it is sent, or replaces it by lists in lists."""

    def __init__(self, out: queue.Queue[bytes], back: queue.Queue[bytes], chance: random.Random) -> None:
        super().__init__(out, back)
        self._chance = chance
        self._left = chance.randrange(8)

    def send(self, data: bytes) -> None:
        self._left -= 1
        if self._left == -1:
            damaged = bytearray(data)
            damaged[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
            data = bytes(damaged) if self._chance.random() < 0.8 else b"\x91" * 100_000 + b"\x90"
        super().send(data)


@pytest.mark.parametrize("damaged_end", ["the sender's", "the receiver's"])
def test_damaged_messages_end_in_one_kind_of_error_that_says_what_the_weights_are(damaged_end: str) -> None:
    num_failed = 0
    for seed in range(8):
        requests: queue.Queue[bytes] = queue.Queue()
        answers: queue.Queue[bytes] = queue.Queue()
        here, there = QueueControl(requests, answers), QueueControl(answers, requests)
        if damaged_end == "the sender's":
            here = DamagingControl(requests, answers, random.Random(seed))
        else:
            there = DamagingControl(answers, requests, random.Random(seed))
        model = nn.Linear(5, 3)
        before = model.weight.detach().clone()
        sender = rlcore.WeightSender({"weight": torch.full((3, 5), 2.0), "bias": torch.full((3,), 2.0)}, here)
        receiver = rlcore.WeightReceiver(model, there)
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(receiver.receive, 1.0)
            try:
                sender.send(timeout_s=0.5)
            except SyncError:
                num_failed += 1
            try:
                received.result()
            except SyncError as error:
                num_failed += 1
                assert "The model's weights are" in str(error)
                assert ("are whole" in str(error)) is receiver.is_whole
        if receiver.is_whole:
            assert torch.equal(model.weight, before) or bool((model.weight == 2.0).all())
        sender.close()
        receiver.close()
    assert num_failed > 4
