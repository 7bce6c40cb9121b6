"""The messages for the workers of a host go in few messages of Ray. Ray is not needed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.engines.launchers.ray import outbox as outbox_module
from rlcore.engines.launchers.ray.link import HostLink
from rlcore.engines.launchers.ray.outbox import Outbox
from rlcore.engines.launchers.ray.wire import Posted, PostedBatch, decoded, viewed

Sent = list[tuple[PostedBatch, list[bytes]]]


def outbox_and_sent() -> tuple[Outbox, Sent]:
    sent: Sent = []
    return Outbox(
        lambda head, buffers: sent.append((decoded(head, PostedBatch, "batch"), [bytes(one) for one in buffers]))
    ), sent


def test_what_is_posted_to_many_workers_goes_in_one_message_in_its_order() -> None:
    outbox, sent = outbox_and_sent()
    for worker in range(100):
        outbox.post(Posted("call", worker, call=worker, body=b"%d" % worker), [])
    assert not sent
    outbox.flush()
    outbox.flush()
    outbox.post(Posted("cancel", 7), [])
    outbox.flush()
    (first, _), (second, _) = sent
    assert (first.order, second.order) == (0, 1)
    assert [(one.process, one.body) for one in first.messages] == [(worker, b"%d" % worker) for worker in range(100)]
    assert [one.kind for one in second.messages] == ["cancel"]


def test_a_tensor_that_several_workers_get_is_sent_once() -> None:
    outbox, sent = outbox_and_sent()
    shared, own = torch.arange(6, dtype=torch.int16).view(2, 3), [torch.full((4,), value) for value in (1.5, 2.5)]
    for worker in range(2):
        outbox.post(Posted("call", worker), [shared, own[worker], torch.empty(0, 3), shared.view(-1)])
    outbox.flush()
    ((batch, buffers),) = sent
    assert sorted(map(len, buffers)) == [0, 12, 16, 16]
    for worker, message in enumerate(batch.messages):
        found = [viewed(dtype, shape, memoryview(bytearray(buffers[at]))) for dtype, shape, at in message.tensors]
        for tensor, wanted in zip(found, [shared, own[worker], torch.empty(0, 3), shared.view(-1)], strict=True):
            assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


def test_large_tensors_do_not_wait_for_the_last_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "BATCH_BYTES", 1000)
    outbox, sent = outbox_and_sent()
    for worker in range(5):
        outbox.post(Posted("call", worker), [torch.zeros(600, dtype=torch.uint8)])
    outbox.flush()
    assert [[one.process for one in batch.messages] for batch, _ in sent] == [[0, 1], [2, 3], [4]]
    assert [len(buffers) for _, buffers in sent] == [2, 2, 1]


@pytest.mark.parametrize("error", [RuntimeError("Ray is shut down"), KeyboardInterrupt()])
def test_a_batch_that_cannot_be_sent_loses_its_host(error: BaseException) -> None:
    """The agent would wait for it for ever before it takes what comes after it."""

    def refuse(head: bytes, buffers: Any) -> None:
        raise error

    lost: list[HostLink] = []
    link: Any = HostLink.__new__(HostLink)
    link._lock, link._processes, link.host, link.why_lost = threading.RLock(), {}, "a", ""
    link._actor, link._agent_process, link._on_loss = (
        SimpleNamespace(post=SimpleNamespace(remote=refuse)),
        None,
        lost.append,
    )
    link._end_agent = lambda: None
    link._outbox = Outbox(link._send)
    link.post(Posted("call", 1))
    if isinstance(error, Exception):
        link.flush()
    else:
        with pytest.raises(KeyboardInterrupt):
            link.flush()
    assert lost == [link] and link.why_lost == (str(error) or "KeyboardInterrupt")
    link.post(Posted("forget", 1))
    link.flush()
