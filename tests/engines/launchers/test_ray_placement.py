"""Which devices of which hosts an engine gets; and what `launcher="ray"` says without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from rlcore.engines.launchers.base import Host
from rlcore.engines.launchers.ray.hosts import hosts_of
from rlcore.engines.launchers.ray.placement import Wishes, assign
from rlcore.errors import DeviceError, InvalidInputError
from tests.warm import run_warm

A = Host(name="a", address="10.0.0.1", counts={"cuda": 4, "cpu": 8})
B = Host(name="b", address="10.0.0.2", counts={"cuda": 2, "cpu": 8})


def found(*hosts: Host, **wishes: Any) -> list[str]:
    return assign(hosts or (A, B), Wishes(**{"kind": "cuda", **wishes}))


def test_a_host_that_holds_all_is_taken_before_two() -> None:
    assert found(num_workers=2) == ["a/cuda:0", "a/cuda:1"]
    assert found(B, A, num_workers=3) == ["a/cuda:0", "a/cuda:1", "a/cuda:2"], "b has two"
    assert found(num_workers=6) == [*(f"a/cuda:{i}" for i in range(4)), "b/cuda:0", "b/cuda:1"]


def test_groups_are_not_cut_by_hosts() -> None:
    three = Host(name="c", address="10.0.0.3", counts={"cuda": 3})
    assert found(three, B, num_workers=4, group_size=2) == ["c/cuda:0", "c/cuda:1", "b/cuda:0", "b/cuda:1"]
    assert found(three, B, group_size=2) == ["c/cuda:0", "c/cuda:1", "b/cuda:0", "b/cuda:1"], "all that is left"


def test_all_of_a_hosts_own_memory_is_one_group() -> None:
    assert found(kind="cpu", is_host_kind=True) == ["a/cpu:0"]
    assert found(kind="cpu", is_host_kind=True, shared=("b/cpu:3", "b/cpu:4")) == ["b/cpu:3", "b/cpu:4"]


def test_workers_are_spread_alike_over_the_number_of_hosts() -> None:
    assert found(num_workers=4, num_hosts=2) == ["a/cuda:0", "a/cuda:1", "b/cuda:0", "b/cuda:1"]
    assert found(num_workers=2, num_hosts=1, held={"a/cuda:0": "x", "a/cuda:1": "x", "a/cuda:2": "x"}) == [
        "b/cuda:0",
        "b/cuda:1",
    ]
    with pytest.raises(
        InvalidInputError, match=r"spread alike over num_hosts=2; give a num_hosts that divides 3, or none"
    ):
        found(num_workers=3, num_hosts=2)
    with pytest.raises(InvalidInputError, match=r"num_hosts must be a whole number of at least 1, got 0"):
        found(num_workers=3, num_hosts=0)
    with pytest.raises(InvalidInputError, match=r"num_hosts, or devices or colocate_with"):
        found(num_workers=2, num_hosts=2, devices=("a/cuda:0", "b/cuda:0"))
    with pytest.raises(
        DeviceError,
        match=r"2 hosts with 3 free devices each are needed and 1 have so many: "
        r"a has cuda:0, cuda:1, cuda:2, cuda:3 \(none is held\); b has cuda:0, cuda:1 \(none is held\)",
    ):
        found(num_workers=6, num_hosts=2)


def hosts_of_names(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.split("/")[0] for name in names))


ROWS = [("a", "r1", "n1"), ("b", "r2", "n2"), ("c", "r2", "n3"), ("d", "r2", "n3"), ("e", "r1", "n4")]
"""Host, rack and NVLink domain."""
NEAR = [
    Host(name=name, address="10.0.0.1", counts={"cuda": 2}, labels={"rack": rack, "ray.io/gpu-domain": domain})
    for name, rack, domain in ROWS
]


def test_a_number_of_hosts_is_taken_of_those_that_are_near_each_other() -> None:
    assert hosts_of_names(found(*NEAR, num_workers=4, num_hosts=2)) == ["c", "d"], "of one NVLink domain"
    assert hosts_of_names(found(*NEAR, num_workers=3, num_hosts=3)) == ["b", "c", "d"], "of one rack"
    assert hosts_of_names(found(*NEAR, num_workers=8, num_hosts=4)) == ["a", "b", "c", "d"], "no rack has four"
    assert hosts_of_names(found(*NEAR, num_workers=4, num_hosts=2, held={"c/cuda:0": "x"})) == ["a", "e"]


def test_pack_takes_as_few_hosts_as_will_do() -> None:
    uneven = [Host(name=f"h{at}", address="10.0.0.1", counts={"cuda": count}) for at, count in enumerate((2, 8, 1, 8))]
    assert hosts_of_names(found(*uneven, num_workers=16)) == ["h1", "h3"]
    assert hosts_of_names(found(*uneven, num_workers=17)) == ["h0", "h1", "h3"]
    assert hosts_of_names(found(*uneven, num_workers=18, group_size=2)) == ["h0", "h1", "h3"]
    assert len(found(*uneven)) == 19, "all"


def test_pack_takes_hosts_that_are_near_each_other() -> None:
    assert hosts_of_names(found(*NEAR, num_workers=2)) == ["a"]
    assert hosts_of_names(found(*NEAR, num_workers=4)) == ["c", "d"], "of one NVLink domain"
    assert hosts_of_names(found(*NEAR, num_workers=4, held={"c/cuda:0": "x"})) == ["a", "e"], "of one rack"
    assert hosts_of_names(found(*NEAR, num_workers=6)) == ["b", "c", "d"]
    assert hosts_of_names(found(*NEAR, num_workers=8)) == ["a", "b", "c", "d"], "there is no rack of so many"


def test_spread_deals_groups_to_hosts_in_turn() -> None:
    assert found(num_workers=2, strategy="spread") == ["a/cuda:0", "b/cuda:0"]
    assert found(num_workers=5, strategy="spread") == [*(f"a/cuda:{i}" for i in range(3)), "b/cuda:0", "b/cuda:1"]
    assert found(num_workers=4, strategy="spread", group_size=2) == ["a/cuda:0", "a/cuda:1", "b/cuda:0", "b/cuda:1"]
    assert found(num_workers=2, strategy="spread", num_hosts=2) == ["a/cuda:0", "b/cuda:0"]
    with pytest.raises(DeviceError, match="7 devices are needed and 6 can be used"):
        found(num_workers=7, strategy="spread")
    with pytest.raises(InvalidInputError, match="strategy must be one of pack, spread, got 'STRICT_PACK'"):
        found(num_workers=2, strategy="STRICT_PACK")
    with pytest.raises(InvalidInputError, match="strategy='pack' or num_hosts=2, which spreads"):
        found(num_workers=2, strategy="pack", num_hosts=2)
    with pytest.raises(InvalidInputError, match="strategy, or devices or colocate_with"):
        found(num_workers=1, strategy="spread", devices=("a/cuda:0",), is_exact=True)


def test_hosts_are_accepted_by_their_labels() -> None:
    labelled = [Host(name=name, address="10.0.0.1", counts={"cuda": 2}, labels={"rack": name}) for name in "xy"]
    assert found(*labelled, num_workers=2, labels={"rack": "y"}) == ["y/cuda:0", "y/cuda:1"]
    with pytest.raises(DeviceError, match="no accepted host has host_labels rack=z: x has rack=x; y has rack=y"):
        found(*labelled, num_workers=2, labels={"rack": "z"})
    with pytest.raises(DeviceError, match=r"devices names x/cuda:0, and host_labels \{'rack': 'y'\} leaves x out"):
        found(*labelled, num_workers=1, devices=("x/cuda:0",), is_exact=True, labels={"rack": "y"})
    with pytest.raises(InvalidInputError, match=r"host_labels must be a dict of words such as .*, got 'rack=y'"):
        found(*labelled, num_workers=1, labels="rack=y")


def test_an_impossible_request_says_what_each_host_has_and_who_holds_it() -> None:
    with pytest.raises(
        DeviceError,
        match=r"6 devices are needed and 5 can be used: a has cuda:0, cuda:1, cuda:2, cuda:3 "
        r"\(a/cuda:1 is held by the train engine\); b has cuda:0, cuda:1 \(none is held\)",
    ):
        found(num_workers=6, held={"a/cuda:1": "the train engine"})


def test_devices_are_named_with_their_host() -> None:
    named = {"num_workers": 2, "is_exact": True}
    assert found(devices=("b/cuda:1", "a/cpu:5"), **named) == ["b/cuda:1", "a/cpu:5"], "in the order asked for"
    assert found(B, devices=("cuda:1", "cuda"), **named) == ["b/cuda:1", "b/cuda:0"], "a cluster of one host"
    for devices, text in [
        (("cuda:0", "b/cuda:1"), r"names 'cuda:0', and the cluster has 2 hosts: say which, such as 'a/cuda:0'"),
        (("c/cuda:0", "b/cuda:1"), r"names 'c/cuda:0', and the hosts of the cluster are a, b"),
        (("b/cuda:2", "b/cuda:1"), r"b has no device 'cuda:2'; it has 2 cuda, 8 cpu"),
        (("b/cuda:x", "b/cuda:1"), r"b has no device 'cuda:x'"),
        (("b/cuda:1",), r"this engine has 2 workers; devices names 1: \['b/cuda:1'\]"),
        (("b/cuda:1", "b/cuda:1"), r"devices names \['b/cuda:1'\] more than once"),
    ]:
        with pytest.raises(InvalidInputError, match=text):
            found(devices=devices, **named)


def test_hosts_are_accepted_by_their_addresses() -> None:
    assert found(num_workers=2, addresses=["10.0.0.2"]) == ["b/cuda:0", "b/cuda:1"]
    with pytest.raises(DeviceError, match=r"names no host of this cluster, which has a 10.0.0.1, b 10.0.0.2"):
        found(num_workers=2, addresses=["10.0.0.9"])
    with pytest.raises(DeviceError, match=r"devices names a/cuda:0, and acceptable_node_ips .* leaves a out"):
        found(num_workers=1, devices=("a/cuda:0",), is_exact=True, addresses=["10.0.0.2"])
    with pytest.raises(InvalidInputError, match=r"must hold IP addresses, got 'b'"):
        found(num_workers=2, addresses=["b"])
    with pytest.raises(InvalidInputError, match=r"must be a list of addresses, got '10.0.0.2'"):
        found(num_workers=2, addresses="10.0.0.2")


def node(name: str, **more: Any) -> dict[str, Any]:
    facts = {"Alive": True, "NodeID": name + "1", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "host"}
    return facts | {"NodeName": name, "Resources": {"CPU": 16.0, "GPU": 4.0}} | more


def test_hosts_are_the_living_nodes_under_names_of_their_own() -> None:
    nodes = [node("b"), node("10.0.0.1"), node("10.0.0.1", NodeID="2"), node("dead", Alive=False)]
    hosts = [host for host, _ in hosts_of(nodes)]
    assert [host.name for host in hosts] == ["b", "host", "host-2"]
    assert hosts[0].counts["cuda"] == 4 and hosts[0].counts["cpu"] >= 16
    assert [host.name for host, _ in hosts_of([node("n10"), node("n9")])] == ["n9", "n10"]
    assert hosts_of([node("n", Labels={"rack": "r7"})])[0][0].labels == {"rack": "r7"}
    assert hosts_of([node("rack/7")])[0][0].name == "rack-7", "a / ends the host in names of devices"


def test_without_ray_the_extra_is_named() -> None:
    blocked = run_warm(
        "import sys; sys.modules['ray'] = None\n"
        "import rlcore\n"
        "try:\n"
        "    rlcore.init(launcher='ray')\n"
        "except rlcore.errors.MissingDependencyError as error:\n"
        "    print(error)\n"
    )
    assert blocked.stdout == "launcher='ray' needs the package 'ray'; run: pip install 'rlcore[ray]'\n", blocked.stderr


def test_a_launcher_of_one_host_takes_no_number_of_hosts(tmp_path: Any) -> None:
    from rlcore.engines.placement import place_workers

    with pytest.raises(InvalidInputError, match=r"num_hosts=2 needs a launcher with several hosts: launcher='ray'"):
        place_workers("process", 2, num_hosts=2)
    with pytest.raises(InvalidInputError, match=r"strategy='spread' needs a launcher with several hosts"):
        place_workers("process", 2, strategy="spread")
