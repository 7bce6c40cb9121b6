"""Checkpoints that ranks of two hosts write together: into a folder that both see, or else with an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hosts import Host, start_hosts, two_hosts
from tests.warm import LIMIT_S

__all__ = ["start_hosts", "two_hosts"]  # fixtures

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


def test_a_checkpoint_takes_a_folder_that_all_hosts_share(two_hosts: list[Host], tmp_path: Path) -> None:
    own = "/run/checkpoints/run"  # of each host, though the path is the same
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": two_hosts[0].address, "MASTER_PORT": "29500"}
    environment["GLOO_SOCKET_IFNAME"] = "eth0"
    ranks = [
        host.python(
            *["-m", "tests.engines.checkpointing_ranks", str(tmp_path / "run"), own],
            environment=environment | {"RANK": str(rank)},
        )
        for rank, host in enumerate(two_hosts)
    ]
    found = []
    for rank in ranks:
        out, error = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 0, error
        found.append([json.loads(line) for line in out.splitlines()])
    for shared, apart in found:
        assert (shared["saved"], shared["loaded"]) == ("", "")
        assert len(shared["left"]) == 2 and "manifest.json" in shared["left"]
        assert apart["saved"] == (
            f"cannot write the checkpoint {own}: rank 1: {own} is not one folder for all ranks: host host-b does not "
            "see what rank 0 has made there; give a folder on a file system that all hosts share; nothing of it is left"
        )
        assert f"no complete checkpoint in {own}" in apart["loaded"]
        assert apart["left"] == []
        assert "/run/checkpoints/alone is not one folder for all ranks: rank 0 finds data-" in apart["loaded_alone"]
        assert " in it, and rank 1 finds data-" in apart["loaded_alone"]
