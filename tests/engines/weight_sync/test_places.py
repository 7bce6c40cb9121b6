"""A receiver tries whether it can open a sender's memory: containers of one machine may see nothing together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlcore.engines.weight_sync.endpoint import endpoint_info
from rlcore.engines.weight_sync.messages import decoded
from rlcore.engines.weight_sync.transports.reach import Sample, SampleMemory, are_samples_needed, why_unreached
from rlcore.registry import get_device
from tests.hosts import ROOT, StartHosts, start_hosts
from tests.warm import warm

__all__ = ["start_hosts"]  # a fixture

REFUSED = {"route": "packed", "timeout_s": 100}


def far_end(which: str, **wanted: Any) -> list[str]:
    return ["-m", "tests.engines.weight_sync.far_ends", which, json.dumps(wanted)]


def said(program: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, error = program.communicate(timeout=300)
    assert program.returncode == 0, error
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def programs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def check_that_they_met_by_a_group(sent: list[dict[str, Any]], received: list[dict[str, Any]], folder: str) -> None:
    first, refused, last = sent
    assert (first["route"], first["network_bytes"]) == ("collective", 0), "it is one machine"
    why = "packed: it shares memory, and the receiver on cpu:0 cannot open that of the trainer's rank 0: it is on this "
    assert f"{why}machine, and a trial to open its memory failed: " in refused["error"]
    assert f"containers share memory if they see one folder as {folder}" in refused["error"]
    assert refused["seconds"] < 60, "no wait for a deadline"
    assert last["route"] == "collective"
    assert [one["digest"] for one in received if not one["error"]] == [first["digest"], last["digest"]]
    (failed, gone) = (one for one in received if one["error"])
    assert "the sender gave the round up" in failed["error"] and failed["is_whole"]
    assert "the sender is gone" in gone["error"] and gone["is_whole"]


def test_processes_that_see_no_folder_together_take_a_group(
    tmp_path: Path, free_address: str, programs: ExitStack
) -> None:
    """Each looks for the other's socket in its own working folder, as containers look in their own /tmp.

    Their devices are of two kinds, as far as they say, so that the group is one of hosts.
    """
    runtime = "/proc/self/cwd/runtime"
    found = []
    for which in ("sender", "receiver"):
        (tmp_path / which).mkdir()
        arguments = far_end(which, address=free_address, rounds=[{}, REFUSED, {}], kind="another")
        environment = {"RLCORE_RUNTIME": runtime, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        program = subprocess.Popen(
            [*warm(), *arguments],
            env=os.environ | environment,
            cwd=tmp_path / which,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        programs.enter_context(program)
        programs.callback(program.kill)
        found.append(program)
    check_that_they_met_by_a_group(*map(said, found), runtime)
    for which in ("sender", "receiver"):
        folder = tmp_path / which / "runtime"
        assert not folder.exists() or not list(folder.iterdir()), "nothing is left"


@pytest.mark.hosts
@pytest.mark.slow
def test_containers_of_one_machine_take_a_group(start_hosts: StartHosts) -> None:
    with start_hosts(2, is_one_machine=True) as [here, there]:
        address = f"tcp://{here.address}:5000"
        environment = {"RLCORE_RUNTIME": "/run/rlcore"}
        sending = here.python(*far_end("sender", address=address, rounds=[{}, REFUSED, {}]), environment=environment)
        receiving = there.python(*far_end("receiver", address=address), environment=environment)
        check_that_they_met_by_a_group(said(sending), said(receiving), "/run/rlcore")
        for host in (here, there):
            assert host.run("mkdir -p /run/rlcore; ls /run/rlcore /dev/shm").split() == ["/dev/shm:", "/run/rlcore:"]


@pytest.mark.hosts
@pytest.mark.slow
def test_containers_that_see_one_runtime_folder_share_memory(start_hosts: StartHosts, tmp_path: Path) -> None:
    with start_hosts(2, is_one_machine=True) as [here, there]:
        address = f"tcp://{here.address}:5000"
        environment = {"RLCORE_RUNTIME": str(tmp_path / "r")}
        sending = here.python(*far_end("sender", address=address, rounds=[{}, {}]), environment=environment)
        receiving = there.python(*far_end("receiver", address=address), environment=environment)
        sent, received = said(sending), said(receiving)
    assert [one["route"] for one in sent] == ["packed", "packed"]
    assert [one["digest"] for one in received][:2] == [one["digest"] for one in sent]


def test_a_sample_that_cannot_be_shown_or_opened_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import msgspec

    own = endpoint_info(get_device("cpu"))
    other = msgspec.structs.replace(own, process="another")
    far = msgspec.structs.replace(other, machine="another")
    assert not are_samples_needed([own, far], [own]) and are_samples_needed([other], [own])
    memory = SampleMemory()
    shown = memory.show()
    assert memory.show() == shown
    assert why_unreached([own, other, far], own, [shown] * 3) == ["", "", "it is on another machine"]
    assert why_unreached([other], own, None) == ["it has shown none"]
    memory.hide()
    (why,) = why_unreached([other], own, [shown])
    assert "a trial to open its memory failed: " in why and "revoked" in why
    memory.hide()
    cannot = msgspec.msgpack.encode(Sample(why_not="there is no shared memory"))
    assert why_unreached([other], own, [cannot]) == ["there is no shared memory"]
    assert decoded(shown, Sample, "sample").handle is not None
