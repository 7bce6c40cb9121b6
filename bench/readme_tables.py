"""The tables of README.md (``readme.py``): which results of the records they show, and in which words."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from rlcore.bench.bars import Selector
from rlcore.bench.compare import device_of
from rlcore.bench.headlines import median
from rlcore.bench.limits import times, unit
from rlcore.bench.result import CaseResult, Record, read
from rlcore.bench.rivals import is_ours
from rlcore.bench.text import count, quantity, rate, size
from rlcore.errors import BenchError

Cell = Callable[[Record], str]


def table(name: str, results: Path) -> str:
    """Of today's records; raises BenchError where they do not make one."""
    if name not in (*_PARTS, *_ROWS):
        raise BenchError(f"no table {name!r} for the README; known: {', '.join(sorted((*_PARTS, *_ROWS)))}")
    paths = sorted(results.glob(f"{name}-*.json"))
    if not paths:
        raise BenchError(f"no record {name}-*.json in {results}; make one with: rlcore bench run -o")
    records = [read(path) for path in paths]
    if name in _PARTS:
        return "\n".join(map(_PARTS[name], records))
    lines = [[label, *map(cell, records)] for label, cell in _ROWS[name].items()]
    return _lines(["", *map(_machine, records)], lines)


def _lines(header: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *lines))


def _beside_peers(record: Record) -> str:
    lines = [[label, *_ours_and_best(record, *what)] for label, what in _RACES.items()]
    lines += _made_with(record, 4)
    return _lines([_machine(record), "rlcore", "best of the others", "ratio"], lines)


def _ours_and_best(record: Record, case: str, metric: str) -> list[str]:
    """The least of each, with the name of the contender, and how many times as much as ours the other is."""
    sides: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for one in record.cases:
        if one.name == case and one.status == "pass":
            samples = times(one) if metric == "time" else one.samples(metric)
            sides[is_ours(one)].append((statistics.median(samples), one.implementation))
    if not all(sides.values()):
        _case(record, case)
        raise BenchError(f"{case} passed for one side alone in the record of {_machine(record)}")
    ours, other = min(sides[True]), min(sides[False])
    form = _seconds if metric == "time" else "{:.1e}".format
    return [*(f"{form(value)}, {name}" for value, name in (ours, other)), f"{other[0] / ours[0]:.2f}"]


def _beside_plain_loop(record: Record) -> str:
    lines = []
    for label, (case, lengths) in _TRAINED.items():
        names = "engine", "torch FSDP2"
        both = [_first(record, case, {"implementation": name, "lengths": lengths}) for name in names]
        rates, peaks = ([median(one, metric) for one in both] for metric in ("tokens_a_device", "peak_memory"))
        lines.append([label, *map(count, rates), f"{rates[0] / rates[1]:.2f}"])
        lines[-1] += [*(rate(peak, "B") for peak in peaks), f"{peaks[0] / peaks[1]:.2f}"]
    lines.append(["7B from local files to the device, each rank", _read_a_rank(record), *[""] * 5])
    lines += _made_with(record, 7)
    compared = ["rlcore, tokens/s a device", "plain loop", "ratio", "rlcore, peak", "plain loop", "ratio"]
    return _lines([_machine(record), *compared], lines)


def _offload(record: Record) -> str:
    """Rates as shares of a pinned copy's, which the run measured beside them."""
    lines = []
    for label, (case, implementation, first) in _MOVED.items():
        result = _first(record, case, {"implementation": implementation})
        sizes = {metric.name: quantity(median(result, metric.name), metric.unit) for metric in result.metrics}
        sizes |= {name: size(value) for name, value in result.params.items() if isinstance(value, int)}
        shares = [_percent(median(result, f"{first}{way}_of_link")) for way in ("to_host", "to_device")]
        lines.append([label.format(**sizes), *shares, "" if first else _seconds(median(result, "time"))])
    link = _first(record, "offload/trainer", {})
    lines.append(["a pinned copy", *(_gigabytes(median(link, f"link_{way}")) for way in ("to_host", "to_device")), ""])
    lines += _made_with(record, 4)
    return _lines([_machine(record), "to the host", "to the device", "time"], lines)


def _made_with(record: Record, num_columns: int) -> list[list[str]]:
    told = {label: cell(record) for label, cell in _MADE_WITH.items()}
    if record.system.hw_notes:
        told["noted"] = record.system.hw_notes
    return [[label, text, *[""] * (num_columns - 2)] for label, text in told.items()]


def _first(record: Record, case: str, what: Selector) -> CaseResult:
    """Of the results of a case that passed."""
    for one in record.cases:
        facts = {**one.params, "implementation": one.implementation}
        if one.name == case and one.status == "pass" and all(facts.get(key) == what[key] for key in what):
            return one
    _case(record, case)
    told = ", ".join(map(str, what.values()))
    raise BenchError(f"{case} has no number for {told} in the record of {_machine(record)}")


def _machine(record: Record) -> str:
    several = record.system.accelerators_per_node
    return f"{several} x {device_of(record)}" if several > 1 else device_of(record)


def _case(record: Record, name: str) -> CaseResult:
    found = next((case for case in record.cases if case.name == name), None)
    if found is None or found.status != "pass":
        why = "is missing" if found is None else f"has the status {found.status!r}: {found.reason}"
        raise BenchError(f"{name} {why} in the record of {_machine(record)}; the README shows only what passed")
    return found


def _range(case: str, metric: str, form: Callable[[float], str]) -> Cell:
    """Lowest to highest sample."""

    def cell(record: Record) -> str:
        samples = _case(record, case).samples(metric)
        low, high = form(min(samples)), form(max(samples))
        return low if low == high else f"{low} to {high}"

    return cell


def _median(case: str, metric: str, form: Callable[[float], str]) -> Cell:
    return lambda record: form(statistics.median(_case(record, case).samples(metric)))


def _if_measured(case: str, metric: str, form: Callable[[float], str]) -> Cell:
    """Of a run that need not have the case; what it has must have passed."""
    cell = _median(case, metric, form)
    return lambda record: cell(record) if any(found.name == case for found in record.cases) else "not measured"


def _limit(name: str) -> Cell:
    """What the machine was measured to reach."""

    def cell(record: Record) -> str:
        limits = record.calibration.limits if record.calibration else {}
        return rate(limits[name], unit(name)) if name in limits else "not measured"

    return cell


def _model(record: Record) -> str:
    found = next((case for case in record.cases if case.name == "rl/step"), None)
    return str(found.params["model"]) if found else "not measured"


def _control(record: Record) -> str:
    case = _case(record, "quickstart/control")
    return " to ".join(_percent(*case.samples(f"accuracy_{when}")) for when in ("before", "after"))


def _rest(record: Record) -> str:
    """What a run spends outside the four phases."""
    case = _case(record, "quickstart/learns")
    phases = [case.samples(phase) for phase in ("generate", "train", "sync", "offload")]
    return _seconds(
        statistics.median(time - sum(spent) for time, *spent in zip(case.samples("time"), *phases, strict=True))
    )


def _software(record: Record) -> str:
    return f"torch {record.dependencies['torch']}, Python {record.system.python}, host threads: {record.num_threads}"


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _gigabytes(per_second: float) -> str:
    return f"{per_second / 1e9:.1f} GB/s"


_PARTS: dict[str, Callable[[Record], str]] = {
    "kernels": _beside_peers,
    "train": _beside_plain_loop,
    "offload": _offload,
}
_TRAINED = {
    "1.5B, sequences of equal length": ("train/dense_1.5b", "equal"),
    "1.5B, sequences of 64 to 4,096 tokens": ("train/dense_1.5b", "uneven"),
    "7B, sequences of equal length": ("train/dense_7b", "equal"),
}
_MOVED = {
    "a 7B trainer of {moved}, for the first time": ("offload/trainer", "engine", "first_"),
    "the same later, there and back": ("offload/trainer", "engine", ""),
    "{bytes} for the first time": ("offload/first", "arena", ""),
    "the same after `reserve()`": ("offload/first", "arena_reserved", ""),
    "the same by torch's `pin_memory`": ("offload/first", "torch_pin_memory", ""),
    "two sets of {bytes} change places by `swap`": ("offload/swap", "swap", ""),
    "the same two, one after the other": ("offload/swap", "one_after_the_other", ""),
    "five engines in turns by `swap`": ("offload/five_engines", "swap", ""),
    "the same five, one after the other": ("offload/five_engines", "one_after_the_other", ""),
}
_SIZES = "8B", "14B", "1.7B", "0.5B"
_RACES = {
    "`token_logprob`, 16k x 152k, forward": ("kernels/token_logprob_forward", "time"),
    "`token_logprob`, forward and backward": ("kernels/token_logprob", "time"),
    **{
        f"`linear_logprob`, {size}, {what}": (f"kernels/{case}/{size.lower()}", "time")
        for size in _SIZES
        for what, case in (("forward", "linear_logprob_forward"), ("forward and backward", "linear_logprob"))
    },
    **{
        f"`linear_loss`, {size}, forward and backward": (f"kernels/linear_loss/{size.lower()}", "time")
        for size in _SIZES
    },
    "greatest error of a log-prob, logits of unit scale": ("kernels/linear_logprob_accuracy", "logprob_error"),
    "greatest error of a log-prob, logits up to 80": ("kernels/linear_logprob_accuracy", "peaked_logprob_error"),
}
_read_a_rank = _if_measured("train/materialize", "read_a_rank", _gigabytes)
_LEARNS = "quickstart/learns"
_PRODUCT = "matrix product attained, {}"
_MADE_WITH: dict[str, Cell] = {"made with": _software, "commit": Record.commits}
_ROWS: dict[str, dict[str, Cell]] = {
    "full": {
        "model of the step of RL": _model,
        "one step of RL, trainer and sampler in turns, median": _if_measured("rl/step", "time", _seconds),
        "tokens trained a second, whole step": _if_measured("rl/step", "trained_tokens", "{:,.0f}".format),
        "bubble: neither sampling, scoring nor training": _if_measured("rl/step", "bubble", _percent),
        "tokens sampled a second": _if_measured("rollout/hf", "new_tokens", "{:,.0f}".format),
        "one train step, median": _if_measured("train/step", "time", _seconds),
        **{_PRODUCT.format(dtype): _limit(f"product/{dtype}") for dtype in ("float32", "bfloat16")},
        "memory, read and written": _limit("memory"),
        "host to device, pinned": _limit("to_device/pinned"),
        "device to device": _limit("link"),
        **_MADE_WITH,
    },
    "quickstart": {
        "the whole command, five seeds": _range(_LEARNS, "time", _seconds),
        "processor time of it": _range(_LEARNS, "processor", _seconds),
        "held-out accuracy before GRPO": _range(_LEARNS, "accuracy_before", _percent),
        "held-out accuracy after 100 steps": _range(_LEARNS, "accuracy_after", _percent),
        "the same with shuffled rewards, one seed": _control,
        "log-probs, sampler against trainer, at most": _range(_LEARNS, "parity_max", "{:.1e}".format),
        "tokens generated a second": _range(_LEARNS, "generated_tokens_per_s", "{:,.0f}".format),
        "generate, median": _median(_LEARNS, "generate", _seconds),
        "train, median": _median(_LEARNS, "train", _seconds),
        "weight sync, median": _median(_LEARNS, "sync", _seconds),
        "offload and onload, median": _median(_LEARNS, "offload", _seconds),
        "the rest (start, imitation, evaluation, checkpoints), median": _rest,
        **_MADE_WITH,
    },
    "startup": {
        "`import rlcore` in a new process, median": _median("startup/import", "time", _seconds),
        "`rlcore --help` from start to end, median": _median("startup/help", "time", _seconds),
        "`rlcore.get_device(name)`, median": _median("dispatch/device", "time", _seconds),
        "choosing an operator's implementation, median": _median("dispatch/op", "time", _seconds),
        **_MADE_WITH,
    },
    "workers": {
        "a call of a worker process and its answer, median": _median("workers/call", "time", _seconds),
        "a tensor of 256 MiB as argument, median": _median("workers/send", "throughput", _gigabytes),
        "a tensor of 256 MiB as answer, median": _median("workers/receive", "throughput", _gigabytes),
        "four workers until all answer, median": _median("workers/start_4", "time", _seconds),
        "the same, in bare `import torch` processes": _median(
            "workers/start_4", "ratio_to_bare_import", "{:.2f}".format
        ),
        **_MADE_WITH,
    },
}
