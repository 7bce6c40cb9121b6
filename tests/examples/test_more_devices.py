"""examples/more_devices.py on one device, on two of a host, and on two hosts: one program, and the same steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlcore.quickstart.model import quickstart_model
from tests.engines.launchers.ray_faults import ENVIRONMENT, Cluster
from tests.hosts import Host, StartHosts, start_hosts
from tests.warm import ENGINES, LIMIT_S, run_warm

__all__ = ["start_hosts"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = str(Path(__file__).resolve().parents[2] / "examples" / "more_devices.py")
ARGUMENTS = ["--devices", "2", "--steps", "3"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings with a cache that has the model in it."""
    cache = tmp_path_factory.mktemp("cache")
    quickstart_model(seed=0, cache=cache)
    return {"RLCORE_CACHE": str(cache), "RLCORE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


def run_here(settings: dict[str, str], *arguments: str) -> str:
    found = run_warm([PROGRAM, *arguments], env=settings, modules=ENGINES)
    assert found.returncode == 0, found.stderr
    return found.stdout


def steps(printed: str, route: str) -> list[str]:
    """Return what was printed of each step, and check the way of the weights, which is left out."""
    found = re.findall(r"^(step .*)  weights by (\w+)$", printed, re.MULTILINE)
    assert {by for _, by in found} == {route}, printed
    return [step for step, _ in found]


@pytest.fixture(scope="module")
def expected(settings: dict[str, str]) -> list[str]:
    """The steps of two processes of this host."""
    return steps(run_here(settings, *ARGUMENTS), "packed")


def test_one_device_learns_too(settings: dict[str, str]) -> None:
    found = steps(run_here(settings), "local")
    rewards = [float(re.findall(r"reward (\S+)", step)[0]) for step in found]
    assert len(rewards) == 10 and rewards[-1] > rewards[0] + 0.3


@pytest.mark.ray
@pytest.mark.hosts
def test_two_hosts_of_a_ray_cluster_make_the_steps_of_one(
    settings: dict[str, str], expected: list[str], start_hosts: StartHosts
) -> None:
    with start_hosts(2, also=[Path(settings["RLCORE_CACHE"])]) as (here, there):
        Cluster(here, there)
        address = f"{here.address}:6379"
        arguments = [*ARGUMENTS, "--hosts", "2", "--address", address]
        program = here.python(PROGRAM, *arguments, environment=ENVIRONMENT | settings)
        printed, errors = program.communicate(timeout=LIMIT_S)
    assert "trainer and samplers on host-a/cpu:0, host-b/cpu:0" in printed, errors
    assert steps(printed, "relayed") == expected


@pytest.mark.hosts
def test_two_hosts_without_ray_make_the_steps_of_one(
    settings: dict[str, str], expected: list[str], start_hosts: StartHosts
) -> None:
    with start_hosts(2, also=[Path(settings["RLCORE_CACHE"])]) as hosts:
        programs = [
            host.python(PROGRAM, *ARGUMENTS, "--launcher", "torchrun", environment=settings | srun(number, hosts[0]))
            for number, host in enumerate(hosts)
        ]
        for program in programs:
            printed, errors = program.communicate(timeout=LIMIT_S)
            assert steps(printed, "relayed") == expected, errors


def srun(number: int, first: Host) -> dict[str, str]:
    """What `srun --nodes 2 --ntasks-per-node 1` tells the task of a node, and an address, as no name is known here."""
    return {
        **{"SLURM_PROCID": f"{number}", "SLURM_NODEID": f"{number}", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
        **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "host-[a-b]", "SLURM_JOB_ID": "1"},
        "MASTER_ADDR": first.address,
    }
