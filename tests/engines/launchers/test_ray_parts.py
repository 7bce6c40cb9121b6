"""The parts of the launcher "ray" that need no Ray: the store, messages, tokens, addresses."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import rlcore
from rlcore import __version__
from rlcore.engines.launchers.base import Host, LaunchOptions, WorkerPlacement
from rlcore.engines.launchers.failures import describe
from rlcore.engines.launchers.pending_calls import PendingCall
from rlcore.engines.launchers.ray import agent as agent_module
from rlcore.engines.launchers.ray import cluster, heartbeat, watchdog, wire
from rlcore.engines.launchers.ray import link as link_module
from rlcore.engines.launchers.ray._ray_private import _error_name
from rlcore.engines.launchers.ray.agent import Agent
from rlcore.engines.launchers.ray.cluster import Cluster, _agent_actor, _start_local, set_local_variables
from rlcore.engines.launchers.ray.heartbeat import (
    ANSWER_S,
    BEAT_S,
    LOOK_S,
    NEXT_BEAT_S,
    PAUSE_S,
    SILENCE_S,
    START_S,
    Heartbeat,
)
from rlcore.engines.launchers.ray.launcher import RayLauncher
from rlcore.engines.launchers.ray.link import HostLink
from rlcore.engines.launchers.ray.store_actor import ActorStoreAnswer, ActorStoreRequest, StoreActor
from rlcore.engines.launchers.ray.tokens import warn_of_readable_token
from rlcore.engines.launchers.ray.watchdog import MARK, marked
from rlcore.engines.launchers.ray.wire import (
    AgentAnswer,
    HostFacts,
    Opened,
    PlainTensor,
    Posted,
    PostedBatch,
    Said,
    decoded,
    encoded,
    plain_tensor,
    tensor_of,
)
from rlcore.engines.launchers.states import GONE
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import DeviceError, InvalidInputError, StateError
from rlcore.process.guard import FAMILY
from rlcore.process.network_interface import interface_variables
from rlcore.process.python_command import python_command
from rlcore.process.status import state_of
from tests.conftest import RunPython
from tests.warm import LIMIT_S


def ask(store: StoreActor, operation: Any, *keys: str, **fields: Any) -> Any:
    return store.ask(encoded(ActorStoreRequest(operation, list(keys), **fields)))


def answers(*questions: Callable[[StoreActor], Any]) -> list[ActorStoreAnswer]:
    """The answers of one store, asked at once."""

    async def run() -> list[bytes]:
        store = StoreActor()
        return await asyncio.gather(*(question(store) for question in questions))

    return [msgspec.msgpack.decode(data, type=ActorStoreAnswer) for data in asyncio.run(run())]


def test_the_board_keeps_values_as_a_store_of_torch_does() -> None:
    found = answers(
        lambda store: ask(store, "set", "a/k", value=b"v"),
        lambda store: ask(store, "get", "a/k", timeout_s=1),
        lambda store: ask(store, "add", "a/n", amount=2),
        lambda store: ask(store, "add", "a/n", amount=3),
        lambda store: ask(store, "check", "a/k", "a/n"),
        lambda store: ask(store, "check", "a/k", "a/x"),
        lambda store: ask(store, "count", "a/"),
        lambda store: ask(store, "compare_set", "a/k", expected=b"w", value=b"x"),
        lambda store: ask(store, "compare_set", "a/k", expected=b"v", value=b"x"),
        lambda store: ask(store, "compare_set", "a/new", expected=b"", value=b"x"),
        lambda store: ask(store, "compare_set", "a/other", expected=b"y", value=b"x"),
        lambda store: ask(store, "delete", "a/n"),
        lambda store: ask(store, "delete", "a/n"),
        lambda store: ask(store, "forget", "a/"),
        lambda store: ask(store, "count", ""),
    )
    assert [one.value for one in found] == [b"", b"v", *[b""] * 5, b"v", b"x", b"x", b"y", *[b""] * 4]
    assert [one.number for one in found] == [0, 0, 2, 5, 1, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0]


def test_who_waits_at_the_board_is_woken_or_told_what_did_not_come() -> None:
    woken, late, _, _ = answers(
        lambda store: ask(store, "wait", "a", "b", timeout_s=60),
        lambda store: ask(store, "wait", "a", "never", timeout_s=0.05),
        lambda store: ask(store, "set", "a", value=b"1"),
        lambda store: ask(store, "set", "b", value=b"2"),
    )
    assert woken == ActorStoreAnswer(b"1") and late.missing == ["never"]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_tensor_comes_as_it_went_in_memory_of_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = torch.randn(shape).to(dtype)
    (said,) = decoded(encoded([Said("result", 1, 2, b"x", [plain_tensor(given)])]), list[Said], "messages")
    back = tensor_of(said.tensors[0])
    assert back.dtype == dtype and torch.equal(back, given)
    back.untyped_storage().resize_(0)  # of a buffer that Python owns torch refuses that


def test_a_large_tensor_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Msgpack has no bytes of 4 GiB."""
    monkeypatch.setattr(wire, "PIECE_BYTES", 5)
    given = torch.arange(4, dtype=torch.int32).view(2, 2)
    told = plain_tensor(given)
    assert [len(piece) for piece in told.data] == [5, 5, 5, 1]
    back = tensor_of(decoded(encoded(told), PlainTensor, "tensor"))
    assert back.dtype == given.dtype and torch.equal(back, given)


def test_what_is_no_message_is_refused() -> None:
    good = encoded([Said("result", 1, 2, b"x")])
    for wrong in (good[:-1], b"", b"\xc1", encoded([["surprise", 1]]), encoded({"kind": "result"}), encoded(7)):
        with pytest.raises(InvalidInputError, match="are no message"):
            decoded(wrong, list[Said], "message")
    for tensor in (
        PlainTensor("float32", (3,), [memoryview(b"1234")]),
        PlainTensor("float32", (3,), [memoryview(b"12"), memoryview(b"34")]),
        PlainTensor("float32", (-1, -1), [memoryview(b"1234")]),
        PlainTensor("nn", (1,), [memoryview(b"1234")]),
    ):
        with pytest.raises(InvalidInputError, match="these 4 bytes are no"):
            tensor_of(tensor)


def test_a_token_that_others_can_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    path = tmp_path / "token"
    path.write_text("secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    for mode, is_named in [(0o644, True), (0o640, True), (0o600, False)]:
        path.chmod(mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_readable_token()
        assert (f"can read Ray's token in {path} (mode {mode:04o})" in caplog.text) == is_named
        assert "secret" not in caplog.text
    path.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")  # Ray takes it before the file's
    caplog.clear()
    warn_of_readable_token()
    assert not caplog.text


def test_an_address_is_that_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match=r"address is that of a Ray cluster, .* got launcher='process'"):
        rlcore.init(launcher="process", address="auto")
    with pytest.raises(InvalidInputError, match=r"such as '10.0.0.1:6379', or 'auto', got 'ray://10.0.0.1:10001'"):
        rlcore.init(address="ray://10.0.0.1:10001")


def test_a_program_that_joins_leaves_it_to_ray_to_wait_for_a_head_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job scripts start the head beside the program."""

    def init(address: str, **_: object) -> None:
        raise ConnectionError("Ray has waited in vain")

    monkeypatch.setattr(cluster, "_clusters", [])
    monkeypatch.setattr(cluster, "_import_ray", lambda: SimpleNamespace(init=init, is_initialized=lambda: False))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(DeviceError, match=r"no Ray cluster can be joined at .*: Ray has waited in vain; start one"):
            cluster.connect(f"127.0.0.1:{silent.getsockname()[1]}")


def test_the_interface_of_an_address() -> None:
    assert interface_variables("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"
    with pytest.raises(DeviceError, match=r"no network interface of .* has the address 198.51.100.254"):
        interface_variables("198.51.100.254")


def test_a_process_that_is_silent_is_ended() -> None:
    """What a stopped agent is to its watchdog."""
    with subprocess.Popen(["sleep", "600"]) as silent, subprocess.Popen(["sleep", "600"]) as heard:
        watch = "rlcore.engines.launchers.ray.watchdog:watch"
        command = [python_command(watch, silent.pid, 1), python_command(watch, heard.pid, 600)]
        with (
            subprocess.Popen(command[0], stdin=subprocess.PIPE) as first,
            subprocess.Popen(command[1], stdin=subprocess.PIPE) as second,
        ):
            assert second.stdin is not None
            second.stdin.write(b".")
            second.stdin.flush()
            assert silent.wait(60) == -9
            assert first.wait(60) == 0
            second.stdin.close()
            assert second.wait(60) == 0, "it ends with who writes to it"
            assert state_of(heard.pid) == "S"
            heard.kill()


def test_what_is_left_of_a_cluster_is_ended_after_its_program() -> None:
    mark = f"test-{os.getpid()}"
    with (
        subprocess.Popen(["sleep", "600"]) as program,
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: mark, FAMILY: "1-2"}) as guard,
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: mark}) as left,
    ):
        end = python_command("rlcore.engines.launchers.ray.watchdog:end_cluster", program.pid, mark)
        with subprocess.Popen(end) as ender:
            assert set(marked(mark)) == {guard.pid, left.pid} and marked("another") == []
            assert ender.poll() is None
            program.kill()
            program.wait()
            assert left.wait(60) == -9
            guard.terminate()  # as it ends by itself, when it has removed the files of its worker
            assert guard.wait(60) == -15, "it was killed too, and a worker's files are left"
            assert ender.wait(60) == 0


def test_a_worker_whose_guard_does_nothing_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.0)
    monkeypatch.setattr(watchdog, "_WORKERS_S", 0.1)
    mark = f"test-{os.getpid()}"
    with (
        subprocess.Popen(["true"]) as program,
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: mark, FAMILY: "1-2"}) as worker,
    ):
        program.wait()
        watchdog.end_cluster(str(program.pid), mark)
        assert worker.wait(60) == -9


@pytest.mark.ray
def test_a_cluster_without_tokens_is_refused_unless_the_user_insists(run_python: RunPython, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    program = (
        "import sys, rlcore\n"
        "from rlcore.engines.launchers.launch import start_workers\n"
        "class Worker:\n"
        "    def __init__(self, context): pass\n"
        "    def close(self): pass\n"
        "from rlcore.engines.launchers.ray.cluster import connect\n"
        "rlcore.init(launcher='ray', insecure_cluster=bool(int(sys.argv[1])))\n"
        "try:\n"
        "    host = connect().hosts()[0].name\n"
        "    start_workers(Worker, 'e', [f'{host}/cpu:0'], launcher='ray', timeout_s=100).stop()\n"
        "    print('started')\n"
        "except rlcore.errors.StateError as error:\n"
        "    print(error)\n"
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = {"RAY_AUTH_MODE": "disabled", "RLCORE_RUNTIME": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    refused = run_python([str(path), "0"], env=environment)
    assert "lets everybody in who reaches its ports" in refused.stdout, refused.stderr
    assert "rlcore.init(insecure_cluster=True)" in refused.stdout
    insisted = run_python([str(path), "1"], env=environment)
    assert insisted.stdout == "started\n", insisted.stderr


@pytest.mark.ray
def test_an_agent_that_ray_ends_for_want_of_memory_says_what_to_do() -> None:
    pytest.importorskip("ray")
    from ray.core.generated.common_pb2 import ErrorType

    told = _error_name(str(ErrorType.OUT_OF_MEMORY).encode())
    assert told.startswith("OUT_OF_MEMORY: Ray ended it") and "RAY_memory_monitor_refresh_ms=0" in told
    assert _error_name(str(ErrorType.ACTOR_DIED).encode()) == "ACTOR_DIED"


@pytest.mark.ray
def test_an_agent_takes_the_accelerators_of_its_host_sees_all_of_them_and_is_never_started_again() -> None:
    pytest.importorskip("ray")
    asked: dict[str, Any] = {}

    def options(**given: Any) -> Any:
        asked.update(given)
        return SimpleNamespace(remote=lambda: "the actor")

    ray = SimpleNamespace(remote=lambda kind: SimpleNamespace(options=options))
    node = {"NodeID": "ab" * 28, "Resources": {"CPU": 64.0, "GPU": 8.0, "NPU": 16.0}}
    assert _agent_actor(ray, node) == "the actor"
    assert (asked["num_cpus"], asked["num_gpus"], asked["resources"]) == (0, 8.0, {"NPU": 16.0})
    variables = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
    assert [asked["runtime_env"]["env_vars"][f"RAY_EXPERIMENTAL_NOSET_{name}"] for name in variables] == ["1", "1"]
    assert (asked["max_restarts"], asked["max_task_retries"]) == (0, 0)
    assert (asked["scheduling_strategy"].node_id, asked["scheduling_strategy"].soft) == (node["NodeID"], False)


def test_a_host_without_tokens_or_of_another_version_is_refused() -> None:
    good = HostFacts(pid=1, machine="", rlcore_version=__version__, has_token=True)
    without, older = (msgspec.structs.replace(good, **one) for one in ({"has_token": False}, {"rlcore_version": "0"}))
    for is_insecure, facts, reason in [
        (False, without, r"lets everybody in who reaches its ports, and so run code on host a: start it with RAY_AUTH"),
        (True, older, rf"host a has rlcore 0, and this is {re.escape(__version__)}; install the same version"),
    ]:
        cluster = Cluster(None, is_own=False, is_insecure=is_insecure)
        cluster._check(SimpleNamespace(host="a", facts=good))
        with pytest.raises((StateError, InvalidInputError), match=reason):
            cluster._check(SimpleNamespace(host="a", facts=facts))
    Cluster(None, is_own=False, is_insecure=True)._check(SimpleNamespace(host="a", facts=without))


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_local_cluster_keeps_its_priority_and_has_a_token_of_its_own_unless_ray_has_one(
    is_imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reads the variables of its token when it is imported, and the others when a cluster starts."""
    variables = {"RAY_USAGE_STATS_ENABLED": "1"}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(sys, "modules", {"ray": None} if is_imported else {})
    set_local_variables()
    assert (variables["RAY_worker_niceness"], variables["RAY_memory_monitor_refresh_ms"]) == ("0", "0")
    assert variables["RAY_USAGE_STATS_ENABLED"] == "1", "the user's own"
    assert ("RAY_AUTH_TOKEN" in variables, "RAY_AUTH_MODE" in variables) == (not is_imported,) * 2


def test_a_cluster_that_does_not_start_says_what_to_do() -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore.")

    with pytest.raises(
        DeviceError, match=r"has started: The current node timed out .*RAY_agent_register_timeout_ms=600000"
    ):
        _start_local(SimpleNamespace(init=init))
    assert MARK not in os.environ


def test_a_message_that_cannot_be_taken_is_the_error_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those after it are taken: they come in the order of their numbers, without a gap."""
    agent: Any = Agent.__new__(Agent)
    agent._taking, agent._early, agent._next, agent._said = threading.Lock(), {}, 0, queue.SimpleQueue()
    agent._processes, taken = {3: None}, []

    def call(process: Any, posted: Posted, buffers: Any) -> None:
        taken.append(posted.call)
        if posted.call == 7:
            raise ValueError("planted")

    agent._call = call
    for order, number in [(1, 8), (0, 7), (2, 9)]:
        agent.post(encoded(PostedBatch(order, [Posted("call", 3, call=number)])), [])
    assert taken == [7, 8, 9]
    said, _ = agent._said.get_nowait()
    assert (said.kind, said.process, said.call) == ("error", 3, 7) and b"planted" in said.body
    assert agent._said.empty()


class Clock:
    """The seconds of a test; who sleeps is not waited for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


def test_a_beat_waits_at_the_agent_until_a_process_stops_or_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, agent = Clock(), Agent.__new__(Agent)
    monkeypatch.setattr(agent_module, "time", clock)
    first, second = SimpleNamespace(is_stopped=False), SimpleNamespace(is_stopped=True)
    agent._processes = {3: first, 5: second}  # type: ignore[dict-item]

    def beat(known: list[int]) -> tuple[list[int], float]:
        began = clock.now
        found = decoded(agent.beat(known), list[int], "beat")
        assert agent._heard == began, "the program was there"
        return found, clock.now - began

    assert beat([5]) == ([5], BEAT_S)
    assert beat([]) == ([5], 0)
    clock.on_sleep = lambda: setattr(first, "is_stopped", True)
    assert beat([5]) == ([3, 5], LOOK_S)
    clock.on_sleep = lambda: setattr(second, "is_stopped", False)
    assert beat([3, 5]) == ([3], LOOK_S)


def test_a_host_is_asked_again_and_again_with_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that answers at once each time, which would take all of the program's time."""
    clock, asked = Clock(), list[tuple[float, list[int]]]()
    monkeypatch.setattr(heartbeat, "time", clock)
    link: Any = HostLink.__new__(HostLink)
    link.host, link.why_lost, link._lock = "a", "", threading.RLock()
    link._processes = {3: SimpleNamespace(is_stopped=False), 5: SimpleNamespace(is_stopped=True)}
    link.lose = lambda why: setattr(link, "why_lost", why)

    def ask_plain(method: Any, known: list[int], *, timeout_s: float) -> bytes:
        assert (method, timeout_s) == (Agent.beat, ANSWER_S)
        asked.append((clock.now, known))
        if len(asked) == 3:
            raise StateError("its agent has ended: ACTOR_DIED")
        return encoded([3])

    link.ask_plain = ask_plain
    Heartbeat(link)
    for thread in threading.enumerate():
        if thread.name == "rlcore-heartbeat-a":
            thread.join(LIMIT_S)
    assert asked == [(100.0, [5]), (100.0 + PAUSE_S, [3]), (100.0 + 2 * PAUSE_S, [3])]
    assert link.why_lost == "its agent has ended: ACTOR_DIED"


class EndedError(Exception):
    """The end of an agent, in a test."""


@pytest.mark.parametrize(("stalled_s", "is_lost"), [(SILENCE_S, False), (SILENCE_S + BEAT_S + PAUSE_S, True)])
def test_an_agent_bears_a_program_that_stands_still(
    stalled_s: float, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of ``SILENCE_S``, although it held the last beat and the program paused after the answer."""
    clock, agent = Clock(), Agent.__new__(Agent)
    monkeypatch.setattr(agent_module, "time", clock)
    ended = list[float]()

    def end(status: int) -> None:
        ended.append(clock.now)
        raise EndedError

    monkeypatch.setattr(os, "_exit", end)
    agent._watchdog = SimpleNamespace(stdin=SimpleNamespace(fileno=lambda: -1))  # type: ignore[assignment]  # one that has ended
    agent._heard = 100.0  # when the last beat came
    next_beat = 100.0 + BEAT_S + PAUSE_S + stalled_s - LOOK_S / 2  # within that look at the clock

    def hear() -> None:
        if clock.now >= next_beat and agent._heard == 100.0:
            agent._heard = clock.now
            clock.on_sleep = lambda: None

    clock.on_sleep = hear
    with pytest.raises(EndedError):
        agent._live()
    assert (agent._heard == 100.0) == is_lost
    assert ended == [agent._heard + NEXT_BEAT_S]


@pytest.mark.parametrize(("held_s", "is_lost"), [(BEAT_S + SILENCE_S - 0.5, False), (BEAT_S + SILENCE_S, True)])
def test_a_program_bears_an_agent_that_stands_still(
    held_s: float, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of ``SILENCE_S``, although the agent holds a beat that changes nothing."""
    clock, why = Clock(), list[str]()
    monkeypatch.setattr(heartbeat, "time", clock)

    def beat(timeout_s: float) -> None:
        clock.sleep(min(held_s, timeout_s))
        if held_s >= timeout_s:
            raise StateError("beat() of its agent did not end")
        link.why_lost = "the test ends"

    link: Any = SimpleNamespace(host="a", why_lost="", beat=beat, lose=why.append)
    Heartbeat(link)
    for thread in threading.enumerate():
        if thread.name == "rlcore-heartbeat-a":
            thread.join(LIMIT_S)
    assert why == (["it did not answer for 12 s"] if is_lost else [])


@pytest.mark.parametrize(
    ("why_lost", "raised", "told"),
    [
        ("", ValueError("ACTOR_DIED"), "host host-b: its agent has ended: ACTOR_DIED"),
        ("", TimeoutError(), "host host-b: new_store() of its agent did not end within 10 s"),
        ("it did not answer for 12 s", None, "host host-b: it is lost: it did not answer for 12 s"),
    ],
)
def test_a_question_that_a_host_does_not_answer_names_it(
    why_lost: str, raised: Exception | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain_bytes(ref: Any, timeout_s: float) -> bytes:
        assert raised is not None
        raise raised

    monkeypatch.setattr(link_module, "plain_bytes", plain_bytes)
    link: Any = HostLink.__new__(HostLink)
    link.host, link.why_lost = "host-b", why_lost
    link._actor = SimpleNamespace(new_store=SimpleNamespace(remote=lambda: None))
    with pytest.raises(StateError, match=f"^{re.escape(told)}$"):
        link.new_store()


def silent_link(monkeypatch: pytest.MonkeyPatch, answer: bytes | None = None) -> Any:
    """The link to an agent that gives no answer to any question, or always this one."""

    def plain_bytes(ref: Any, timeout_s: float) -> bytes:
        if answer is None:
            raise TimeoutError
        return answer

    monkeypatch.setattr(link_module, "plain_bytes", plain_bytes)
    link: Any = HostLink.__new__(HostLink)
    link.host, link.why_lost, link._lock, link._agent_process = "host-b", "", threading.RLock(), None
    link._actor = SimpleNamespace(kill=SimpleNamespace(remote=lambda *_: None))
    link._processes, link._ended_early, link._end_agent, link._on_loss = {}, set(), lambda: None, lambda _: None
    return link


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "kill() of its agent did not end within 10 s"),
        (encoded(AgentAnswer(failure=describe(KeyError(4)))), "its agent failed: KeyError: 4"),
    ],
)
def test_a_host_whose_worker_cannot_be_ended_is_lost_and_named_once(
    answer: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = silent_link(monkeypatch, answer)
    opened = Opened(process=4, worker=0, pid=1, name="name", local_name="cpu:0")
    process = link._process(SimpleNamespace(python=""), opened)
    pending = PendingCall(WorkerContext("e", 1, 2, "host-b/cpu:0", 0), "step", 9.0)
    process.calls.add(pending)
    process.kill("the test ends it")
    assert link.why_lost == why
    told = str(pending.future.exception())
    assert f"was lost with its host host-b ({why})" in told and told.count("host-b") == 2, "its device names it too"
    with pytest.raises(StateError, match=f"^{re.escape(f'host host-b: it is lost: {why}')}$"):
        link.new_store()
    assert process.stack() == GONE


def test_an_agent_that_fails_is_named_by_its_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    link = silent_link(monkeypatch, encoded(AgentAnswer(failure=describe(KeyError(4)))))
    link._actor = SimpleNamespace(new_store=SimpleNamespace(remote=lambda: None))
    with pytest.raises(StateError, match=r"^host host-b: its agent failed: KeyError: 4\n"):
        link.new_store()


def test_a_host_whose_agent_does_not_start_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain_bytes(ref: Any, timeout_s: float) -> bytes:
        raise TimeoutError

    monkeypatch.setattr(link_module, "plain_bytes", plain_bytes)
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "1"))
    actor = SimpleNamespace(facts=SimpleNamespace(remote=lambda: None))
    host = Host(name="host-b", address="10.0.0.2", counts={"cpu": 1})
    told = (
        f"no agent started on host host-b (10.0.0.2): facts() of its agent did not end within {START_S:g} s. It takes"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(told)}"):
        Cluster(ray, is_own=False, is_insecure=False)._link(host, {"NodeID": "2"}, actor)


def test_a_process_that_ends_before_it_is_known_is_no_error_of_its_host() -> None:
    link: Any = HostLink.__new__(HostLink)
    link._lock, link._processes, link._ended_early, link.host = threading.RLock(), {}, set(), "a"
    link._take(Said("ended", 5))
    process = link._process(
        SimpleNamespace(python=""), Opened(process=5, worker=0, pid=1, name="name", local_name="cpu:0")
    )
    assert process.stack() == GONE
    process.engines.clear()
    assert process.join(0)
    with pytest.raises(InvalidInputError, match=r"^it tells of a process 6 that it has not opened"):
        link._take(Said("result", 6))


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (("cpu:0",), r"launcher 'ray' takes devices with their host, such as '.*/cpu:0', got 'cpu:0'"),
        (("a/cpu:0", "b/cpu:0"), "one worker drives a/cpu:0, b/cpu:0, which are of 2 hosts; give it devices of one"),
    ],
)
def test_devices_of_no_host_or_of_two_are_refused_before_a_cluster_is_looked_for(
    devices: tuple[str, ...], reason: str
) -> None:
    options = LaunchOptions(engine="the train engine", timeout_s=1)
    with pytest.raises(InvalidInputError, match=reason):
        RayLauncher().start(object, [WorkerPlacement(devices)], options)
