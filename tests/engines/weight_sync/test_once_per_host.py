"""Each byte crosses the network once for each host, however many receivers it has."""

from __future__ import annotations

import json
import subprocess

import pytest

from rlcore.engines.weight_sync.transports.collective import relay_tree
from tests.hosts import Host, start_hosts, two_hosts

from .test_places import far_end, said
from .test_two_hosts import wait_until_sent

__all__ = ["start_hosts", "two_hosts"]  # fixtures

MEBI = 1 << 20
NUM_ELEMENTS = 2 * MEBI  # of 4 bytes
NBYTES = 4 * NUM_ELEMENTS + 2 * 21
LIMITED = {"timeout_s": 100, "staging_bytes": MEBI}


def test_a_bucket_goes_once_to_each_machine_and_by_turns_through_its_ranks() -> None:
    machines = ["a", "a", "b", "b", "b", "c"]
    assert relay_tree(0, [1, 2, 3, 4, 5], machines, 0) == {0: [1, 2, 5], 2: [3, 4], 5: []}
    assert relay_tree(0, [1, 2, 3, 4, 5], machines, 4) == {0: [1, 3, 5], 3: [2, 4], 5: []}
    assert relay_tree(5, [2, 4], machines, 1) == {5: [4], 4: [2]}
    assert relay_tree(0, [1], machines, 0) == {0: [1]}


@pytest.mark.hosts
@pytest.mark.slow
def test_two_receivers_of_a_host_share_what_came(two_hosts: list[Host]) -> None:
    """In the last round the link goes down, amid changes: one error at each end, and nothing mixed is called whole."""
    here, there = two_hosts
    here.limit(80)
    common = {"address": f"tcp://{here.address}:5000", "num_elements": NUM_ELEMENTS}
    delta = LIMITED | {"delta": True}
    rounds = [delta | {"verify": True}, delta, delta, delta | {"every": 2, "timeout_s": 20}]
    before = here.sent_bytes()
    sending = here.python(*far_end("sender", **common, rounds=rounds, num_receivers=2))
    receiving = [there.python(*far_end("receiver", **common)) for _ in range(2)]
    wait_until_sent(here, before + int(2.3 * NBYTES))  # and a fourth of what changed in the last round
    gone = here.sent_bytes() - before
    here.cut()
    whole, told, again, failed = said(sending)
    assert "is gone" in failed["error"] and failed["seconds"] < 60
    for one in map(said, receiving):
        assert [own["digest"] for own in one[:3]] == [own["digest"] for own in (whole, told, again)]
        assert one[3]["error"] and (one[3]["is_whole"], one[3]["version"]) == (False, 3)
    assert (whole["route"], whole["is_delta"]) == ("collective", False)
    assert (whole["network_bytes"], whole["moved_bytes"]) == (2 * NBYTES, 2 * NBYTES), "verification brings all again"
    for one in (told, again):
        assert one["is_delta"] and one["moved_bytes"] == 2 * one["network_bytes"]
        assert 0.01 * NBYTES < one["network_bytes"] < 0.03 * NBYTES
    assert gone < 2.5 * NBYTES, "each byte has gone once"


def start_ranks(hosts: list[Host], num_each: int, **wanted: object) -> list[subprocess.Popen[str]]:
    """Start the ranks of a trainer, so many on each host."""
    size = num_each * len(hosts)
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    common["GLOO_SOCKET_IFNAME"] = "eth0"  # of torch's own group, which the program makes before it asks rlcore
    module = ["-m", "tests.engines.weight_sync.colocated_ranks", json.dumps({"num_elements": NUM_ELEMENTS} | wanted)]
    return [hosts[rank // num_each].python(*module, environment=common | {"RANK": str(rank)}) for rank in range(size)]


@pytest.mark.hosts
@pytest.mark.slow
def test_ranks_of_two_hosts_relay_to_samplers_in_their_own_processes(two_hosts: list[Host]) -> None:
    """In the last round the link goes down: one error on every rank, and no mixture that is called whole."""
    here, _ = two_hosts
    deltas = [LIMITED | {"delta": True}] * 3
    rounds = [
        LIMITED,
        *deltas,
        LIMITED | {"verify": True, "route": "relayed"},
        {"timeout_s": 20, "staging_bytes": 1024},
    ]
    ranks = start_ranks(two_hosts, 2, rounds=rounds, timeout_s=20)
    last: list[str] = []
    assert ranks[0].stdout is not None
    for _ in range(5):
        last.append(ranks[0].stdout.readline())
    wait_until_sent(here, here.sent_bytes() + MEBI)  # of the round that is cut, which has so many buckets
    here.cut()
    first, *others = ranks
    told = [json.loads(line) for line in [*last, *first.communicate(timeout=300)[0].splitlines()]]
    found = [told, *map(said, others)]
    for own in found:
        dense, began, delta, again, verified, failed = own
        assert (dense["route"], dense["network_bytes"], dense["moved_bytes"]) == ("relayed", NBYTES, 4 * NBYTES)
        assert not began["is_delta"] and began["why_dense"].startswith("there is no base yet")
        for one in (delta, again):
            assert one["is_delta"] and one["network_bytes"] == one["moved_bytes"] / 4 < 0.03 * NBYTES
        assert verified["network_bytes"] == 2 * NBYTES
        assert all(one["is_equal"] for one in own[:-1])
        assert failed["error"] and failed["seconds"] < 60
        assert (failed["is_whole"], failed["version"]) == (False, 5)
    assert len({own[0]["digest"] for own in found}) == 1
