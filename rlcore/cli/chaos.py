"""The command ``rlcore chaos``: rounds of faults until the time is over, and a summary."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rlcore.cli.console import AsJson, DeviceName, print_json
from rlcore.errors import DeviceError, InvalidInputError
from rlcore.torch_import import import_torch

if TYPE_CHECKING:
    from rlcore.chaos.driver import ChaosRound

_INTERRUPTED = 130


def chaos(
    minutes: Annotated[
        float | None, typer.Option(help="No round begins after these.", show_default="10, without --rounds")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="No more rounds than these.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first round; each further one has the next.")] = 0,
    device: DeviceName = None,
    fault: Annotated[list[str] | None, typer.Option(help='Only this fault, such as "kill"; repeat.')] = None,
    as_json: AsJson = False,
) -> None:
    """Meet training programs with faults at random moments, and check after each that every promise was kept.

    Exit code 0 when all were kept, 1 when one was not, which is shown with the command that repeats it, 2 for a wrong
    option, 130 when it was interrupted. Ctrl-C, SIGTERM and SIGHUP end the run with its summary.
    """
    import_torch()
    from rlcore.chaos.driver import ENDS_A_RUN, options_of
    from rlcore.chaos.driver import rounds as run_rounds

    if minutes is not None and not 0 < minutes < float("inf"):
        raise typer.BadParameter(f"it must be a number above 0, got {minutes:g}", param_hint="--minutes")
    try:
        options = options_of(device, fault or ())
    except InvalidInputError as error:
        raise typer.BadParameter(str(error), param_hint="--fault") from error
    except DeviceError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    deadline = time.monotonic() + 60 * (minutes or (10.0 if rounds is None else float("inf")))
    stream = sys.stderr if as_json else sys.stdout
    found: list[ChaosRound] = []
    is_interrupted = False
    before = {number: signal.getsignal(number) for number in ENDS_A_RUN}
    for number in ENDS_A_RUN:
        if before[number] is not signal.SIG_IGN:  # as nohup starts a program
            signal.signal(number, signal.default_int_handler)
    show = lambda line: print(line, file=stream, flush=True)  # noqa: E731
    with contextlib.closing(run_rounds(options, seed, show, found)) as running:
        try:
            while len(found) != rounds and time.monotonic() < deadline:
                next(running)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if as_json:
        print_json({"device": options.device, "rounds": [_plain(round_) for round_ in found]})
    else:
        print(_summary(found))
    raise typer.Exit(int(any(round_.violations for round_ in found)) or _INTERRUPTED * is_interrupted)


def _plain(round_: ChaosRound) -> dict[str, object]:
    return asdict(round_) | {"incidents": [msgspec.to_builtins(incident) for incident in round_.incidents]}


def _summary(found: list[ChaosRound]) -> str:
    incidents = [incident for round_ in found for incident in round_.incidents]
    faults = Counter(incident.fault for incident in incidents)
    broken = [round_ for round_ in found if round_.violations]
    lines = [
        f"{len(found)} round(s), {len(incidents)} incident(s), {sum(bool(one.outcome) for one in incidents)} of them "
        f"with an error: {', '.join(f'{name} {number}' for name, number in sorted(faults.items())) or 'none'}",
        f"promises that were not kept: {sum(len(round_.violations) for round_ in broken) or 'none'}",
        *(f"  {round_.repeat}: {round_.violations[0].partition(chr(10))[0]}" for round_ in broken),
    ]
    return "\n".join(lines)
