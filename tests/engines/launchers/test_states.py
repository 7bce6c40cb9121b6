"""The state of a worker as its stack says it."""

from __future__ import annotations

import pytest

from rlcore.engines.launchers.states import GONE, STOPPED, Suspicion, state_of_worker


def stack(*frames: str) -> str:
    return "Current thread 0x1 (most recent call first):\n" + "\n".join(
        f'  File "{file}", line 7 in {function}' for file, function in (frame.split(" ") for frame in frames)
    )


@pytest.mark.parametrize(
    ("text", "suspicion", "words"),
    [
        (STOPPED, Suspicion.STOPPED, "is stopped (SIGSTOP)"),
        (GONE, Suspicion.GONE, "has ended"),
        ("no stack came within 1 s (process state R)", Suspicion.UNKNOWN, "shows no stack"),
        (
            stack("/env/torch/distributed/distributed_c10d.py all_reduce", "/home/me/policy.py norm"),
            Suspicion.IN_COLLECTIVE,
            "is in a collective (all_reduce)",
        ),
        (
            stack("/env/torch/_ops.py __call__", "/env/torch/distributed/_functional_collectives.py wait_tensor"),
            Suspicion.IN_COLLECTIVE,
            "is in a collective (wait_tensor)",
        ),
        (
            stack("/home/me/policy.py reward", "/env/torch/distributed/fsdp/_fully_shard/_fsdp_state.py _pre_forward"),
            Suspicion.ELSEWHERE,
            "is in reward (policy.py)",
        ),
    ],
)
def test_the_innermost_frame_that_is_no_plumbing_decides(text: str, suspicion: Suspicion, words: str) -> None:
    assert state_of_worker(text) == (suspicion, words)


def test_a_stopped_worker_is_blamed_before_one_that_waits() -> None:
    assert min(Suspicion) == Suspicion.STOPPED and max(Suspicion) == Suspicion.IN_COLLECTIVE
