"""Rewards over HTTP: many in a request, deadlines, and what a server may do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

import pytest

from rlcore.conformance.ends import wait_until
from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError
from rlcore.rollout import RemoteVerifier, RolloutController, SingleTurn
from tests.rollout.simulated_engine import SimulatedEngine

DRIPPING = {
    "drips headers": b"HTTP/1.1 200 OK\r\nX: ",
    "drips an error": b"HTTP/1.1 500 no\r\nContent-Length: 200\r\n\r\n",
}
"""Beginnings of answers that go on a byte at a time."""


class Server(ThreadingHTTPServer):
    """Rewards an answer by its number; some texts make it misbehave. It keeps how many items each request had."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sizes: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.refused = "refuse"
        self.num_lost = 0
        """Answers that the client did not take to their ends."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/verify"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        self.server.sizes.append(len(items))
        texts = [item["text"] for item in items]
        if texts == ["hang"]:
            time.sleep(1)
            return
        self.server.may_answer.wait(20)
        if texts == [self.server.refused]:
            self.send_error(503, "no room")
            return
        if texts[0] in DRIPPING:
            self.wfile.write(DRIPPING[texts[0]])
            with contextlib.suppress(OSError):
                for _ in range(200):
                    time.sleep(0.1)
                    self.wfile.write(b"a")
                return
            self.server.num_lost += 1
            return
        if texts == ["garbage"]:
            self.wfile.write(b"no HTTP\r\n\r\n")
            return
        answers: dict[str, Any] = {
            "few": {"rewards": []},
            "nan": {"rewards": [float("nan")]},
            "other": {"scores": [1]},
            "text": {"rewards": "1"},
            "huge": {"rewards": [10**400]},
        }
        rewards = {"rewards": [item["data"]["factor"] * len(item["text"]) for item in items]}
        body = json.dumps(answers.get(texts[0], rewards)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for at in range(len(body)):
            if texts == ["drip"]:
                time.sleep(0.1)
            self.wfile.write(body[at : at + 1] if texts == ["drip"] else body)
            if texts != ["drip"]:
                break

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_waits_goes_together_and_rewards_go_to_their_own(server: Server) -> None:
    async def all_together() -> list[float]:
        return await asyncio.gather(*(verifier({"factor": 10}, "x" * count) for count in range(1, 11)))

    with RemoteVerifier(server.url, max_items=4, max_requests=2) as verifier:
        assert asyncio.run(all_together()) == [10.0 * count for count in range(1, 11)]
    assert sorted(server.sizes) == [2, 4, 4]


def test_others_go_on_while_the_server_thinks_and_the_cancelled_are_not_asked(server: Server) -> None:
    server.may_answer.clear()

    async def beside() -> tuple[float, list[int]]:
        first = asyncio.ensure_future(verifier({"factor": 1}, "a"))
        while not server.sizes:
            await asyncio.sleep(0.001)  # the loop is free
        dropped, kept = (asyncio.ensure_future(verifier({"factor": 1}, text)) for text in ("bb", "ccc"))
        await asyncio.sleep(0)
        dropped.cancel()
        server.may_answer.set()
        return await kept, [len(server.sizes), int(await first)]

    with RemoteVerifier(server.url, max_requests=1) as verifier:
        assert asyncio.run(beside()) == (3.0, [2, 1])
    assert server.sizes == [1, 1]


def test_many_items_at_once_are_each_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop stands still: 16,384 items took it 7 s when each look went through all that waited."""
    num_looks = 0

    def count(frame: FrameType, event: str, called: Any) -> None:
        nonlocal num_looks
        num_looks += event == "c_call" and called.__name__ == "done"

    async def all_together() -> list[float]:
        return await asyncio.gather(*(verifier({}, "") for _ in range(500)))

    with RemoteVerifier("http://127.0.0.1:9/x", max_items=10) as verifier:
        monkeypatch.setattr(verifier, "_rewards", lambda opener, body, number: [1.0] * number)
        sys.setprofile(count)
        try:
            assert asyncio.run(all_together()) == [1.0] * 500
        finally:
            sys.setprofile(None)
    assert 500 <= num_looks <= 10 * 500


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("hang", RolloutTimeoutError, "did not answer within 0.3 s"),
        ("drip", RolloutTimeoutError, "did not answer within 0.3 s"),
        ("drips headers", RolloutTimeoutError, "did not answer within 0.3 s"),
        ("drips an error", RolloutTimeoutError, "did not answer within 0.3 s"),
        ("refuse", RolloutError, "answered 503: "),
        ("few", RolloutError, "must answer 1 finite rewards, got 0"),
        ("nan", RolloutError, r"must answer 1 finite rewards, got 1: \[nan\]"),
        ("other", RolloutError, r'must answer {"rewards": \[numbers\]}, got '),
        ("text", RolloutError, r'must answer {"rewards": \[numbers\]}, got '),
        ("huge", RolloutError, r'must answer {"rewards": \[numbers\]}, got '),
        ("garbage", RolloutError, "answered something else than HTTP: BadStatusLine"),
    ],
)
def test_a_server_that_misbehaves_is_named(server: Server, text: str, kind: type[Exception], told: str) -> None:
    async def asked() -> float:
        return await verifier({"factor": 1}, text)

    # Who is answered has as long as a busy machine takes.
    timeout_s = 0.3 if kind is RolloutTimeoutError else 60.0
    with RemoteVerifier(server.url, timeout_s=timeout_s) as verifier, pytest.raises(kind, match=told):
        asyncio.run(asked())
    if text in DRIPPING:
        wait_until(lambda: server.num_lost, "the thread of the request reads on")


def test_wrong_arguments_are_refused(server: Server) -> None:
    with pytest.raises(InvalidInputError, match="an address that begins with http"):
        RemoteVerifier("file:///etc/passwd")
    with pytest.raises(InvalidInputError, match="timeout_s"):
        RemoteVerifier(server.url, timeout_s=0)
    verifier = RemoteVerifier(server.url)
    with pytest.raises(InvalidInputError, match="must be plain data"):
        asyncio.run(verifier(object(), "x"))
    verifier.close()
    with pytest.raises(StateError, match="is closed; make another"):
        asyncio.run(verifier({}, "x"))
    with RemoteVerifier("http://127.0.0.1:9/x") as absent, pytest.raises(RolloutError, match="cannot be asked"):
        asyncio.run(absent({}, "x"))


# ------------------------------------------------------------------------------------------------- in a controller


def controller(server: Server, max_items: int = 64, **options: Any) -> RolloutController:
    verifier = RemoteVerifier(server.url, timeout_s=5, max_items=max_items)
    return RolloutController(
        SimulatedEngine(), SingleTurn(verifier, prompt=lambda data: [data["length"], 1]), **options
    )


def test_episodes_are_sampled_while_the_server_thinks_and_get_their_own_rewards(server: Server) -> None:
    items = [{"length": length, "factor": factor} for length in (1, 2, 5) for factor in (1.0, 10.0, -1.0)]
    server.may_answer.clear()
    rollout = controller(server, batch_size=len(items))
    try:
        for item in items:
            rollout.submit(item)
        until(lambda: server.sizes)
        assert rollout.stats.given == 0
        server.may_answer.set()
        batch = rollout.wait(timeout_s=20)
    finally:
        rollout.close()
    expected = sorted(item["factor"] * item["length"] for item in items)
    found = sorted(one.reward for episode in batch for one in episode.trajectories)
    assert found == expected and sum(server.sizes) == len(items)
    assert len(server.sizes) < len(items), "what waited meanwhile goes together"


def test_a_server_that_refuses_costs_its_own_episodes_alone(server: Server) -> None:
    """The simulated engine's texts are sevens; the server answers those of three with an error."""
    server.refused = "777"
    rollout = controller(server, max_items=1, batch_size=4, max_failures_in_row=3)
    try:
        for length in (1, 3, 2, 4, 5):
            rollout.submit({"length": length, "factor": 1.0})
        batch = rollout.wait(timeout_s=20)
        assert sorted(one.reward for episode in batch for one in episode.trajectories) == [1, 2, 4, 5]
        until(lambda: rollout.stats.failed == 1)
        for _ in range(3):
            rollout.submit({"length": 3, "factor": 1.0})
        with pytest.raises(RolloutError, match=r"[34] episodes have failed in a row, the last one with .*503.*no room"):
            rollout.wait(timeout_s=20)
    finally:
        rollout.close()


def until(condition: Any) -> None:
    while not condition():
        time.sleep(0.002)
