"""Weight syncs between two hosts: by a group over the network, which may be slow, and may be cut in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, start_hosts, three_hosts, two_hosts
from tests.warm import LIMIT_S

from .test_places import far_end, said

__all__ = ["start_hosts", "three_hosts", "two_hosts"]  # fixtures

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

MEBI = 1 << 20
NUM_ELEMENTS = 4 * MEBI  # of 4 bytes
LIMITED = {"timeout_s": 60}


def meet(
    two_hosts: list[Host], rounds: list[dict[str, Any]], *, num_elements: int = NUM_ELEMENTS, timeout_s: float = 100
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start a sender on one host and a receiver on the other, both with one process id."""
    here, there = two_hosts
    common = {"address": f"tcp://{here.address}:5000", "num_elements": num_elements}
    sending = here.python(*far_end("sender", **common, rounds=rounds), own_pid=5000)
    receiving = there.python(*far_end("receiver", **common, timeout_s=timeout_s), own_pid=5000)
    return sending, receiving


def test_weights_go_to_another_host_by_a_group(two_hosts: list[Host]) -> None:
    before = two_hosts[0].sent_bytes()
    sent, received = map(said, meet(two_hosts, [LIMITED, LIMITED | {"staged": True}, LIMITED | {"route": "packed"}]))
    gone = two_hosts[0].sent_bytes() - before
    assert {one["pid"] for one in [*sent, *received]} == {5000}, "and yet they are two processes"
    *done, refused = sent
    nbytes = 4 * NUM_ELEMENTS + 2 * 21
    for one in done:
        assert (one["route"], one["moved_bytes"], one["network_bytes"]) == ("collective", nbytes, nbytes)
    assert "cannot open that of the trainer's rank 0: it is on another machine" in refused["error"]
    assert [one["digest"] for one in received[:2]] == [one["digest"] for one in done]
    assert 2 * nbytes < gone < 2.3 * nbytes, "each byte goes once"


def test_a_slow_link_only_takes_longer(two_hosts: list[Host]) -> None:
    two_hosts[0].limit(80)
    sent, received = map(said, meet(two_hosts, [{"timeout_s": 100}]))
    (done,) = sent
    assert done["seconds"] > 0.9 * done["network_bytes"] * 8 / 80e6
    assert received[0]["digest"] == done["digest"]


def wait_until_sent(host: Host, num_bytes: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while host.sent_bytes() < num_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_staged", [True, False])
def test_a_link_that_is_cut_in_a_sync_is_one_error_on_both_sides(two_hosts: list[Host], is_staged: bool) -> None:
    here, _ = two_hosts
    here.limit(80)  # 1.7 s for each round
    timeout_s = 20.0
    # What has come by then is many buckets, which the receiver takes even after the cut.
    rounds = [LIMITED, {"staged": is_staged, "timeout_s": timeout_s, "staging_bytes": MEBI}]
    before = here.sent_bytes()
    sending, receiving = meet(two_hosts, rounds)
    wait_until_sent(here, before + int(1.5 * 4 * NUM_ELEMENTS))
    here.cut()
    sent, received = said(sending), said(receiving)
    first, failed = sent
    assert "route" in first
    cut = "its host does not answer any more, or the network to it is cut"
    assert failed["error"] == f"receiver 0 is gone; receive() found: {cut}"
    assert failed["seconds"] < timeout_s + 20
    old, stopped = received
    assert "receive() failed here: CollectiveTimeoutError: recv from rank 0 of group 'weights'" in stopped["error"]
    assert "then the sender is gone: " in stopped["error"]
    assert stopped["seconds"] < timeout_s + 20
    assert old["digest"] == first["digest"]
    assert stopped["version"] == 1
    if is_staged:
        assert stopped["is_whole"] and stopped["digest"] == old["digest"]
    else:
        assert not stopped["is_whole"]
        assert "The model's weights are a mixture" in stopped["error"]


def test_a_trainer_on_two_hosts_gives_its_shards_to_a_third(three_hosts: list[Host], tmp_path: Path) -> None:
    *trainers, sampler = three_hosts
    address = f"tcp://{trainers[0].address}:5000"
    script = str(Path(__file__).with_name("sharded_sender.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    master = ["--master-addr", trainers[0].address, "--master-port", "29500", "--nproc-per-node", "1"]
    interface = {"GLOO_SOCKET_IFNAME": "eth0"}  # of torch's own group, which the program makes before it asks rlcore
    sending = [
        host.start(
            [*command, "--node-rank", str(number), *master, script, address, str(tmp_path)],
            environment=interface,
        )
        for number, host in enumerate(trainers)
    ]
    received = said(sampler.python(*far_end("receiver", address=address)))
    for one in sending:
        _, error = one.communicate(timeout=LIMIT_S)
        assert one.returncode == 0, error
    nbytes = 4 * 1000 + 2 * 21
    for rank in range(2):
        found, digests = json.loads((tmp_path / f"sender-{rank}.json").read_text())
        assert found == [["collective", nbytes, nbytes], ["collective", nbytes, 2 * nbytes]], "verify sends all again"
        assert [one["digest"] for one in received[:2]] == digests
