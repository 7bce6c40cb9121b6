"""The store through which the members of a group meet: a receiver asks for it while the sender waits for an answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from rlcore._torch_private import HashStore, PrefixStore
from rlcore.engines.weight_sync.channels import control as control_module
from rlcore.engines.weight_sync.channels.control import CallTypes, RemotePeer, RemoteResult, StoreAsker
from rlcore.engines.weight_sync.channels.peers import LateError, SpmdPeers, SyncPeers
from rlcore.engines.weight_sync.channels.shared_store import (
    AskedStore,
    SharedStore,
    StoreAnswer,
    StoreQuestion,
    answer,
    store_of,
)
from rlcore.errors import SyncError

encode = msgspec.msgpack.encode


class QueueControl:
    def __init__(self, out: queue.Queue[bytes], back: queue.Queue[bytes]) -> None:
        self._out, self._back = out, back

    def send(self, data: bytes) -> None:
        self._out.put(data)

    def recv(self, timeout_s: float) -> bytes:
        try:
            return self._back.get(timeout=max(0.01, timeout_s))
        except queue.Empty as error:
            raise TimeoutError from error


def ends() -> tuple[QueueControl, QueueControl]:
    one: queue.Queue[bytes] = queue.Queue()
    other: queue.Queue[bytes] = queue.Queue()
    return QueueControl(one, other), QueueControl(other, one)


@pytest.fixture
def shared() -> Iterator[SharedStore]:
    shared = SharedStore()
    yield shared
    shared.remove()


def work(path: str) -> int:
    """The method that the sender calls."""
    raise NotImplementedError


def test_a_receiver_uses_the_senders_store_within_a_call(shared: SharedStore) -> None:
    here, there = ends()
    asker = StoreAsker(there)

    def receive() -> None:
        request = asker.next_call(60)
        with asker.during(request.number):
            (path,) = msgspec.msgpack.decode(request.arguments)
            store = store_of(path, asker.ask)
            assert isinstance(store, AskedStore)
            inside = PrefixStore("group", store)  # as torch's libraries have it
            inside.set("theirs", "from the receiver")
            assert not inside.check(["absent"])
            assert inside.get("ours") == b"from the sender"  # waits for it
            found = inside.add("count", 2)
        there.send(encode(RemoteResult(request.number, "", msgspec.Raw(encode(found)))))

    receiving = threading.Thread(target=receive)
    receiving.start()
    own = store_of(shared.path, None)
    assert not isinstance(own, str)
    inside = PrefixStore("group", own)
    inside.add("count", 40)
    threading.Timer(0.2, lambda: inside.set("ours", "from the sender")).start()
    peer = RemotePeer(here, {"work": CallTypes.of(work)})
    assert peer.call("work", [(shared.path,)], 60) == [42]
    assert inside.get("theirs") == b"from the receiver"
    receiving.join()


def test_a_wait_for_what_nobody_writes_ends(shared: SharedStore) -> None:
    store = AskedStore(shared.path, answer)
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"nobody has written \['absent'\] to the sender's store in time"):
        store.get("absent")


def test_outside_a_call_the_store_is_not_asked() -> None:
    _, there = ends()
    asker = StoreAsker(there)
    question = StoreQuestion(store="store:x", operation="check", keys=["a"])
    with pytest.raises(ConnectionError, match="the sender does not wait for an answer now"):
        asker.ask(question)


def test_a_sender_that_goes_on_to_another_call_is_heard(shared: SharedStore) -> None:
    """It gave up the call that the receiver is in: its next call comes where an answer was expected."""
    here, there = ends()
    asker = StoreAsker(there)
    question = StoreQuestion(store=shared.path, operation="check", keys=["a"])
    call = {"number": 2, "method": "abandon", "arguments": []}
    here.send(encode(call))
    with asker.during(1):
        with pytest.raises(ConnectionError, match="the sender has given up the call that needs its store"):
            asker.ask(question)
        with pytest.raises(ConnectionError, match="does not wait for an answer now"):
            asker.ask(question)
    assert asker.next_call(60).method == "abandon"


def test_an_answer_of_the_store_that_comes_late_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_ASK_S", 0.05)
    here, there = ends()
    asker = StoreAsker(there)
    with asker.during(1), pytest.raises(TimeoutError):
        asker.ask(StoreQuestion(store="store:x", operation="check", keys=["a"]))
    here.send(encode(StoreAnswer(store_count=1)))
    here.send(encode({"number": 2, "method": "abandon", "arguments": []}))
    assert asker.next_call(60).method == "abandon"
    here.send(b"\x00junk")
    with pytest.raises(SyncError, match="these 5 bytes are no request"):
        asker.next_call(60)


def test_a_question_of_a_call_that_was_given_up_is_not_answered(shared: SharedStore) -> None:
    here, there = ends()
    peer = RemotePeer(here, {"work": CallTypes.of(work)})
    question = StoreQuestion(store=shared.path, operation="set", keys=["a"], value=b"1")
    there.send(encode(RemoteResult(7, "", asks=question)))
    started = time.monotonic()
    with pytest.raises(LateError, match=r"the receiver did not answer work\(\)"):
        peer.call("work", [("x",)], 0.2)
    assert time.monotonic() - started < 60
    own = store_of(shared.path, None)
    assert not isinstance(own, str) and not own.check(["a"])


def test_what_is_no_operation_of_a_known_store_is_refused(shared: SharedStore) -> None:
    asked: list[dict[str, Any]] = [
        {"store": "store:unknown", "keys": ["a"]},
        {"store": shared.path, "keys": []},
        {"store": shared.path, "keys": ["a"], "value": bytes((1 << 20) + 1)},
    ]
    for fields in asked:
        found = answer(StoreQuestion(operation="set", **fields))
        assert "no such operation, or no store" in found.store_error
    with pytest.raises(RuntimeError, match="no such operation, or no store 'store:unknown', is here"):
        AskedStore("store:unknown", answer).set("a", "b")
    shared.remove()
    assert answer(StoreQuestion(store=shared.path, operation="check", keys=["a"])).store_error
    assert store_of("/a/folder", answer) == "/a/folder"


def test_a_sender_that_waits_in_the_store_of_all_ranks_answers_meanwhile() -> None:
    """A client of a TCPStore holds its lock while it waits for a key."""
    shared = SharedStore("name", dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60)))
    own = store_of(shared.path, None)
    assert not isinstance(own, str)
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        own.wait(["theirs"])

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        is_waiting.wait()
        time.sleep(0.1)  # into the wait, which tells nobody that it has begun
        AskedStore(shared.path, answer).set("theirs", "value")
        waiting.result()
    shared.remove()


def test_ranks_that_share_a_store_have_a_part_of_it_for_each_group() -> None:
    common = HashStore()
    first, again, second = SharedStore("a/0", common), SharedStore("a/0", common), SharedStore("a/1", common)
    AskedStore(first.path, answer).set("key", "value")
    assert AskedStore(again.path, answer).check(["key"])
    assert not AskedStore(second.path, answer).check(["key"])
    for one in (first, again, second):
        one.remove()


@pytest.mark.parametrize("error", [SyncError("it fails"), MemoryError("it fails")], ids=["ours", "anybody's"])
def test_two_sides_of_all_ranks_are_gathered_in_one_order(error: Exception) -> None:
    """The ranks' threads would gather the senders' results with the receivers' otherwise."""
    gathered: list[str] = []

    class Own(SyncPeers):
        label = "own"
        is_here = True

        def call(self, method: str, calls: Any, timeout_s: float) -> list[Any]:
            if method == "fails":
                raise error
            return [method]

        def __len__(self) -> int:
            return 1

    def all_gather(data: bytes) -> list[bytes]:
        gathered.append(str(msgspec.msgpack.decode(data)))
        return [data]

    peers = SpmdPeers(Own(), all_gather, 0)
    gathered.clear()
    finish_first, finish_second = peers.start("first", None, 1), peers.start("fails", None, 1)
    assert gathered == []
    assert finish_first() == ["first"]
    with pytest.raises(type(error), match="it fails"):
        finish_second()
    assert gathered == ["['', ['first']]", "['it fails', []]"]
