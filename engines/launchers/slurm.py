"""Slurm's variables: which task of a step this process is, and torchrun's variables made of them.

``srun`` starts a program once for each task, as torchrun does for each rank, under variables of its own (srun(1),
"OUTPUT ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from rlcore.errors import InvalidInputError

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below those that Linux gives to connections


def use_slurm_variables(environ: MutableMapping[str, str]) -> None:
    """Set torchrun's variables for a task of a Slurm step of several tasks.

    Nothing changes where torchrun has set its own. ``MASTER_ADDR`` and ``MASTER_PORT`` of the user stay; else they are
    the first node of the step, and a port by the numbers of job and step, the same for all of its tasks.

    Raises:
        InvalidInputError: a variable of Slurm is no number, or they do not fit each other.
    """
    if "RANK" in environ or slurm_number(environ, "NTASKS") < 2 or "SLURM_PROCID" not in environ:
        return
    node, counts = slurm_number(environ, "NODEID"), tasks_of_nodes(environ)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if node >= len(counts) or not nodes:
        raise InvalidInputError(
            f"SLURM_PROCID is set, and SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r} or "
            f"SLURM_STEP_NODELIST={nodes!r} does not tell of node {node}; start the program with srun, or with torchrun"
        )
    number = slurm_number(environ, "JOB_ID") + 101 * slurm_number(environ, "STEP_ID")
    environ.setdefault("MASTER_ADDR", first_node(nodes))
    environ.setdefault("MASTER_PORT", str(_FIRST_PORT + number % _NUM_PORTS))
    environ["RANK"] = str(slurm_number(environ, "PROCID"))
    environ["WORLD_SIZE"] = str(slurm_number(environ, "NTASKS"))
    environ["LOCAL_RANK"] = str(slurm_number(environ, "LOCALID"))
    environ["LOCAL_WORLD_SIZE"] = str(counts[node])


def tasks_of_nodes(environ: Mapping[str, str]) -> list[int]:
    """Return the number of tasks of the step on each node: "4(x2),3" is 4, 4 and 3. A batch script is no task."""
    counts: list[int] = []
    for number, _, repeats in re.findall(r"(\d+)(\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(number)] * int(repeats or 1)
    return counts


def first_node(nodes: str) -> str:
    """Return the first name of a list of nodes: of "rack[2-3]n[07,9],other" it is "rack2n07"."""
    whole = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert whole is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", whole[0])


def slurm_number(environ: Mapping[str, str], name: str) -> int:
    """Return the value of ``SLURM_<name>``; 0 when it is not set. Raises InvalidInputError for what is no number."""
    value = environ.get(f"SLURM_{name}", "0")
    if not value.isdecimal():
        raise InvalidInputError(f"SLURM_{name} must be a whole number, got {value!r}")
    return int(value)
