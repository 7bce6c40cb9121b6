"""The driver: it runs round after round, each a program of its own, looks at what they leave, and tells of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.arguments import did_you_mean
from rlcore.chaos.checks import left_of, processes_of
from rlcore.chaos.faults import FAULTS, PAIRS
from rlcore.chaos.plan import Plan, plan_of
from rlcore.chaos.program import INCIDENT_S, IncidentReport
from rlcore.errors import InvalidInputError, MissingDependencyError
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command
from rlcore.registry import get_device

_START_S = 600.0
_GONE_S = 30.0
_GUARDS_S = 10.0
_LAST_LINES = 40
ENDS_A_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the end of a batch job, and the loss of the terminal."""
Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices of a run; with its seed they say everything that a round does."""

    device: str
    """The kind of device, or one device, such as "cuda:1"."""
    executors: tuple[str, ...] = ("hf",)
    faults: tuple[str, ...] = ()
    """Only these; all when empty."""

    def pairs(self) -> list[tuple[str, str]]:
        return [pair for pair in PAIRS if not self.faults or pair[1] in self.faults]

    def command(self, seed: int) -> str:
        """Return the command that repeats a round."""
        chosen = [f"--fault {fault}" for fault in self.faults]
        return " ".join(["rlcore chaos", f"--seed {seed}", "--rounds 1", f"--device {self.device}", *chosen])


@dataclass
class ChaosRound:
    """The record of a round: its incidents, and the promises that were not kept."""

    seed: int
    repeat: str
    incidents: list[IncidentReport] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0


def options_of(device: str | None, faults: Sequence[str]) -> Options:
    """Check what was asked for.

    Raises:
        InvalidInputError: there is no such fault.
        DeviceError: there is no such device.
        MissingDependencyError: transformers, of whose model the program's is made, is absent.
    """
    for fault in faults:
        if fault not in FAULTS:
            raise InvalidInputError(
                f"there is no fault {fault!r}{did_you_mean(fault, FAULTS)}; there are {', '.join(FAULTS)}"
            )
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="rlcore chaos", extra="hf") from error
    found = get_device(device)
    is_one = device is not None and ":" in device
    return Options(device=found.name if is_one else found.spec.name, executors=_executors(), faults=tuple(faults))


def _executors() -> tuple[str, ...]:
    import importlib.util

    return ("hf", "vllm") if importlib.util.find_spec("vllm") else ("hf",)


def rounds(options: Options, seed: int, show: Show, found: list[ChaosRound]) -> Generator[ChaosRound, None, None]:
    """Run rounds with the seeds from ``seed`` on, without end.

    Args:
        show: gets a line for each incident.
        found: gets each round as it begins, so that one that is interrupted is told of, too.
    """
    places, kind = places_of(options.device), get_device(options.device).spec.name
    while True:
        plan = plan_of(seed, options.pairs(), places, kind, options.executors)
        found.append(ChaosRound(seed, options.command(seed)))
        yield _run(plan, found[-1], show)
        seed += 1


def places_of(name: str) -> list[str]:
    """Return the names of the devices that a round may use: one device, or all of a kind."""
    device = get_device(name)
    if name == device.name:
        return [name]
    count = 3 if device.spec.is_host else device.count()
    return [f"{name}:{index}" for index in range(count)]


def _run(plan: Plan, round_: ChaosRound, show: Show) -> ChaosRound:
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="rlcore-chaos-"))
    layout = plan.layout
    try:
        show(f"seed {plan.seed}: trainer on {', '.join(layout.trainers)}, {layout.executor} on {layout.sampler}")
        for folder in ("runtime", "tmp"):
            (scratch / folder).mkdir(mode=0o700)
        _Driven(plan, round_, scratch, show).run()
    finally:
        with _undisturbed():
            _end_processes(scratch)
            shutil.rmtree(scratch, ignore_errors=True)
    round_.seconds = time.monotonic() - started
    return round_


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let the block end although signals come that end a run. They raise KeyboardInterrupt after it."""
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in ENDS_A_RUN}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _end_processes(scratch: Path) -> None:
    """Kill what still runs; but the guards of killed workers first get some seconds to clean up."""
    deadline = time.monotonic() + _GUARDS_S
    while processes_of(scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in processes_of(scratch):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Driven:
    """A round while it runs."""

    def __init__(self, plan: Plan, round_: ChaosRound, scratch: Path, show: Show) -> None:
        self._plan, self._round, self._scratch, self._show = plan, round_, scratch, show
        self._makers: set[int] = set()
        self._log = scratch / "log"

    def run(self) -> None:
        with self._program("rlcore.chaos.program:main") as child:
            child.send(self._plan)
            self._follow(child)
        if self._round.violations:
            return
        self._check_left(f"after the program's end ({self._plan.ending})")
        if self._plan.ending.startswith("SIG"):
            self._go_on()

    @contextlib.contextmanager
    def _program(self, entry: str, *arguments: str) -> Iterator[MessageChild]:
        environment = os.environ | {
            "RLCORE_RUNTIME": str(self._scratch / "runtime"),
            "TMPDIR": str(self._scratch / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._scratch / "cache"),  # torch makes it when imported, to be kept
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        with self._log.open("ab") as log:
            command = python_command(entry, self._scratch, *arguments)
            child = MessageChild(command, environment=environment, errors=log, has_own_session=True)
            self._makers.add(child.pid)
            try:
                yield child
            except BaseException:  # Ctrl-C: nobody waits for its end
                child.kill()
                raise
            finally:
                child.close(_GONE_S)

    def _follow(self, child: MessageChild) -> None:
        """Take the program's messages until it ends; kill it when it is late."""
        last, ending, now = "", self._plan.ending, "its start"
        while (report := self._next(child, _START_S if not last else INCIDENT_S)) is not None:
            self._makers |= {*report.makers}
            if report.kind == "begin":
                now = f"{report.step} x {report.fault}"
            elif report.kind == "end":
                self._take(report)
            elif report.kind == "saving" and last != "saving":
                now = f"a save that {ending} ended"
                self._strike(child.pid, ending)
            elif report.kind == "over":
                now = "its end"
            last = report.kind
        if last not in ("over", "saving") and not self._round.violations:
            lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            self._fail(f"the program ended in {now}, or did not go on:\n" + "\n".join(lines))

    def _next(self, child: MessageChild, timeout_s: float) -> IncidentReport | None:
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        try:
            return child.receive(IncidentReport)
        finally:
            timer.cancel()

    def _strike(self, pid: int, ending: str) -> None:
        """End the program at a random moment: a save begins now, and others follow it."""
        delay_s = random.Random(f"{self._plan.seed}.end").random() * 0.5

        def strike() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, ending))

        threading.Timer(delay_s, strike).start()

    def _take(self, report: IncidentReport) -> None:
        self._round.incidents.append(report)
        words = f" ({report.words})" if report.words else ""
        outcome = report.outcome or "no error"
        self._show(f"  {report.step} x {report.fault}{words}: {outcome[:150]} [{report.seconds:.1f} s]")
        if report.violation:
            self._fail(f"{report.step} x {report.fault}{words}: {report.violation}")

    def _fail(self, violation: str) -> None:
        self._round.violations.append(violation)
        self._show(f"  NOT KEPT: {violation}\n  repeat it: {self._round.repeat}")

    def _check_left(self, when: str) -> None:
        deadline = time.monotonic() + _GONE_S
        while left := left_of(self._scratch, self._makers):
            if time.monotonic() > deadline:
                self._fail(f"{when} there are still: {', '.join(left)}")
                return
            time.sleep(0.2)

    def _go_on(self) -> None:
        """Check that the next program finds a whole checkpoint, and removes what the one before has left."""
        with self._program("rlcore.chaos.program:go_on", self._plan.layout.trainers[0]) as child:
            report = self._next(child, _START_S)
        if report is None or report.violation:
            self._fail(f"the program after a {self._plan.ending}: {report.violation if report else 'it ended'}")
        else:
            self._check_left("after the next program")
