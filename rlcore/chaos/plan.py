"""The plan of a round: everything that is drawn, from the seed alone, so that a round can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

INCIDENTS_OF_A_ROUND = 5
ENDINGS = ("close", "close", "no close", "SIGKILL", "SIGKILL", "SIGTERM", "SIGINT")
"""The ways in which a round's program ends; the signals come at a random moment of a save."""


class Incident(msgspec.Struct, frozen=True):
    """One step of the program, and the fault that meets it."""

    step: str
    fault: str
    seed: str
    """The seed of the moment, the victim and whatever else the step and the fault draw."""


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of the program."""

    device: str
    """The kind of device, such as "cpu"."""
    trainers: list[str]
    """Devices of the trainer's workers."""
    sampler: str
    """Device of the sampler. Where the trainer has a worker there, the two share a process."""
    executor: str
    """The name of the sampler's executor."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    layout: EngineLayout
    incidents: list[Incident]
    ending: str


def plan_of(
    seed: int, pairs: Sequence[tuple[str, str]], places: Sequence[str], device: str, executors: Sequence[str]
) -> Plan:
    """Draw a round.

    Args:
        pairs: steps with the faults that may meet them. They are dealt out like cards, so that each of them comes once
            in so many seeds that follow each other as it takes to deal all of them.
        places: names of the devices there are; with fewer than three the engines may share some.
        executors: inference executors to choose from.
    """
    draw = random.Random(seed)
    rounds_of_a_deck = -(-len(pairs) // INCIDENTS_OF_A_ROUND)
    deck = sorted(pairs)
    random.Random(seed // rounds_of_a_deck).shuffle(deck)
    dealt = deck[seed % rounds_of_a_deck :: rounds_of_a_deck]
    trainers = list(places[: draw.choice([1, 2, 2])])
    others = [place for place in places if place not in trainers] or trainers
    sampler = draw.choice([others[0], others[0], trainers[-1]])
    return Plan(
        seed=seed,
        layout=EngineLayout(device=device, trainers=trainers, sampler=sampler, executor=draw.choice(list(executors))),
        incidents=[Incident(step, fault, f"{seed}.{number}") for number, (step, fault) in enumerate(dealt)],
        ending=draw.choice(ENDINGS),
    )
