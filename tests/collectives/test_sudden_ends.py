"""Ranks raise errors when another one ends suddenly. The process that is killed here is the last that is needed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from rlcore.errors import CollectiveError, PeerDiedError


def give_up(rank: Any, error_type: type[BaseException]) -> tuple[str, tuple[int, ...]]:
    try:
        with rank.new_group("cpu", 3, f"given-up-{error_type.__name__}", timeout_s=90.0) as group:
            if rank.rank == 1:
                raise error_type("mine")
            group.all_reduce(torch.ones(1))
    except CollectiveError as error:
        return str(error), error.ranks
    except error_type:
        return "", ()
    raise AssertionError("no error")


@pytest.mark.parametrize("error_type", [ZeroDivisionError, KeyboardInterrupt])
def test_a_rank_that_gave_up_is_named_with_its_reason(error_type: type[BaseException], on_ranks: Any) -> None:
    for text, ranks in on_ranks(give_up, 3, error_type)[::2]:
        assert text.count("; before, ") == text.count(f"; before, rank 1 gave up: {error_type.__name__}('mine')") == 1
        assert ranks == (1,)


def die_in(rank: Any, operation: str) -> tuple[str, tuple[int, ...], float] | None:
    group = rank.new_group("cpu", 3, f"mortal-{operation}", timeout_s=90.0)
    group.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerDiedError) as error:
        if operation == "recv" and rank.rank == 0:
            group.recv(torch.ones(1), 1)
        else:
            group.all_reduce(torch.ones(1_000_000))
    seconds = time.monotonic() - began
    group.destroy()
    rank.say(f"mortal-{operation}-{rank.rank}-goes")
    rank.hear(*(f"mortal-{operation}-{number}-goes" for number in (0, 2)))
    assert not (rank.folder / f"mortal-{operation}-1").exists(), "what was written is left behind"
    return str(error.value), error.value.ranks, seconds


@pytest.mark.parametrize("operation", [pytest.param("recv", marks=pytest.mark.slow), "all_reduce"])
def test_a_rank_whose_process_was_killed_is_named_at_once(operation: str, on_ranks: Any) -> None:
    answers = on_ranks(die_in, 3, operation, may_end=(1,))
    assert answers[1] is None
    for rank in (0, 2):
        text, dead, seconds = answers[rank]
        assert "of group 'mortal" in text
        assert "rank 1 (process " in text
        assert text.endswith("has ended; destroy() the group and make one without it")
        assert dead == (1,)
        assert seconds < 30.0, "and not the timeout of the group"


def end_by_itself(rank: Any) -> tuple[str, tuple[int, ...]] | None:
    group = rank.new_group("cpu", 3, "unfinished", timeout_s=90.0)
    group.barrier()
    if rank.rank == 1:
        del group  # as the variables of a function that ``sys.exit`` leaves
        rank.last_acts.append(
            lambda: rank.hear("unfinished-0-knows", "unfinished-2-knows")
        )  # an interpreter ends slowly
        rank.ends = True
        return None
    with pytest.raises(PeerDiedError) as error:
        group.all_reduce(torch.ones(1))
    group.destroy()
    rank.say(f"unfinished-{rank.rank}-knows")
    rank.hear("unfinished-0-knows", "unfinished-2-knows")
    assert not (rank.folder / "unfinished-1").exists(), "what was written is left behind"
    return str(error.value), error.value.ranks


def test_a_rank_whose_program_ended_is_named_before_its_interpreter_ends(on_ranks: Any) -> None:
    answers = on_ranks(end_by_itself, 3, may_end=(1,))
    for rank in (0, 2):
        text, ranks = answers[rank]
        assert "rank 1 (process " in text
        assert text.endswith("has ended; destroy() the group and make one without it")
        assert ranks == (1,)
