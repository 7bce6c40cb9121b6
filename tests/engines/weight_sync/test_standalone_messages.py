"""Sender and receiver take only the messages that they expect, whatever the channel brings."""

from __future__ import annotations

import queue
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
        }
        assert answer == expected
    assert (described["number"], described["error"]) == (len(STRANGE), "")
