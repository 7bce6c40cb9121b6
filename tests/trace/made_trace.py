"""Traces that tests write line by line, in milliseconds, as processes would have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from rlcore.spans import SCHEMA

TRAINER, SAMPLER = 1, 2
GB = 1e9


class MadeProcess:
    """Writes the file of one process. Times are milliseconds of its clock; a span is written by ``span`` whole."""

    def __init__(
        self, folder: Path, pid: int = 1, *, host: str = "host-a", boot: str = "boot-a", utc_ms: float = 0
    ) -> None:
        self.path = folder / f"spans-{host}-{pid}-0.jsonl"
        self.write(
            schema=SCHEMA,
            host=host,
            pid=pid,
            command=["train.py"],
            boot=boot,
            monotonic_ns=0,
            utc_ns=round(utc_ms * 1e6),
        )

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self, name: str, at_ms: float, kind: str = "program", *, thread: int = 7, **facts: Any) -> None:
        self.write(begin=name, kind=kind, at=round(at_ms * 1e6), thread=thread, facts=facts)

    def end(self, at_ms: float, *, thread: int = 7, **facts: Any) -> None:
        self.write(end=round(at_ms * 1e6), thread=thread, facts=facts)

    def span(self, name: str, begin_ms: float, end_ms: float, kind: str = "program", **facts: Any) -> Self:
        self.begin(name, begin_ms, kind, **facts)
        self.end(end_ms)
        return self

    def engine(self, number: int, kind: str, devices: list[str], **facts: Any) -> None:
        self.write(event="engine", at=0, facts={"number": number, "kind": kind, "devices": devices, **facts})


def worker_facts(number: int, device: str) -> dict[str, Any]:
    engine = {TRAINER: "the train engine", SAMPLER: "the inference engine"}[number]
    return {"engine": engine, "number": number, "rank": 0, "device": device, "devices": [device]}


class MadeProgram:
    """A program with workers on devices. ``call`` writes what the program asks and what the worker does, a little
    later and shorter: its way there and back takes ``way_ms``."""

    def __init__(self, folder: Path, *, way_ms: float = 0.0) -> None:
        self.program = MadeProcess(folder, 1)
        self._folder, self._way_ms = folder, way_ms
        self._workers: dict[str, MadeProcess] = {}

    def call(self, name: str, number: int, device: str, begin_ms: float, end_ms: float, **facts: Any) -> None:
        if device not in self._workers:
            self._workers[device] = MadeProcess(self._folder, 100 + len(self._workers), utc_ms=1)
        self.program.begin(name, begin_ms, "call", engine="an engine", number=number)
        self.program.end(end_ms, **facts)
        times = begin_ms + self._way_ms, end_ms - self._way_ms
        self._workers[device].span(name, *times, "worker", **worker_facts(number, device))


def moved(tag: str, gigabytes: float, seconds: float, **facts: Any) -> dict[str, Any]:
    nbytes = round(gigabytes * GB)
    usual = {"pinned": True, "first_use": False, "bytes": nbytes, "most_bytes": nbytes}
    return {"tag": tag, "seconds": seconds, **usual, **facts}


def colocated(folder: Path, steps: int = 5) -> MadeProgram:
    """Write a program in which a trainer and a sampler take turns on one device; a step takes a second.

    It generates 300 ms, names 50 ms "rewards", does 50 ms of its own without a name, brings the optimizer back in 200
    ms, trains 250 ms, takes the optimizer away in 100 ms and syncs for 50 ms.
    """
    made = MadeProgram(folder)
    made.program.engine(TRAINER, "train", ["cuda:0"], num_parameters=10**9, weights_bytes=4 * 10**9)
    made.program.engine(SAMPLER, "inference", ["cuda:0"], weights_bytes=2 * 10**9)
    for step in range(steps):
        at = 1000.0 * step
        made.program.begin("step", at)
        made.call("generate", SAMPLER, "cuda:0", at, at + 300, prompts=4, tokens=1000, longest=200)
        made.program.span("rewards", at + 300, at + 350)
        made.call("onload", TRAINER, "cuda:0", at + 400, at + 600, **moved("optimizer", 10.4, 0.2))
        made.call("train_step", TRAINER, "cuda:0", at + 600, at + 850, tokens=2000, micro_batches=2)
        made.call("offload", TRAINER, "cuda:0", at + 850, at + 950, **moved("optimizer", 4.0, 0.1))
        made.program.begin("sync_weights", at + 950, "call", version=step)
        made.program.end(at + 1000, route="local", bytes=2 * 10**9, needed_bytes=2 * 10**9)
        made.program.end(at + 1000)
    return made
