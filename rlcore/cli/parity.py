"""The command ``rlcore parity``: how far a trainer's log-probabilities are from a sampler's, and where they part."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore.cli.console import AsJson, given_path, print_json, print_table
from rlcore.errors import printable
from rlcore.torch_import import import_torch

if TYPE_CHECKING:
    from rlcore.parity.measure import ParityReport
    from rlcore.parity.statistics import LogProbAgreement


def parity(
    folder: Annotated[
        Path, typer.Argument(parser=given_path, metavar="FOLDER", help="A Hugging Face causal language model.")
    ],
    train: Annotated[
        str | None,
        typer.Option(help="Device of the trainer, and of the sampler; else the default one.", metavar="DEVICE"),
    ] = None,
    infer: Annotated[str, typer.Option(help="What samples: hf, vllm, or sglang.")] = "hf",
    dtype: Annotated[str, typer.Option(help="Of both: bfloat16 or float32.")] = "bfloat16",
    sequences: Annotated[int, typer.Option(min=1, max=1 << 20, help="Sequences that are sampled.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are sampled in each.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampler.")] = 1.0,
    prompts: Annotated[
        Path | None, typer.Option(parser=given_path, metavar="FILE", help="A prompt a line; else random tokens.")
    ] = None,
    infer_option: Annotated[
        list[str] | None,
        typer.Option(help='Build option of the sampler, such as "quantization=fp8"; repeat.', metavar="NAME=VALUE"),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="Compare the parts of the model, too.")] = True,
    threshold: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with 1 if the mean absolute difference is above this.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sample from a model, score the tokens by the trainer, and compare log-probs, ratios, and parts of the model."""
    import_torch()
    from rlcore.parity.measure import ParityOptions, measure

    options = ParityOptions(
        train=train,
        infer=infer,
        dtype=dtype,
        sequences=sequences,
        tokens=tokens,
        temperature=temperature,
        layers=layers,
        infer_options=dict(_option(text) for text in infer_option or ()),
    )
    report = measure(folder, options, None if prompts is None else _lines(prompts), _say)
    if as_json:
        print_json(report.plain())
    else:
        _print(report)
    if threshold is not None and report.agreement.mean > threshold:
        _say(f"the mean absolute difference {report.agreement.mean:.3g} is above the threshold {threshold:g}")
        raise typer.Exit(1)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"give NAME=VALUE, got {text!r}", param_hint="--infer-option")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):  # a text, which needs no quotes
        return name, value


def _lines(file: Path) -> list[str]:
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read as text: {error}", param_hint="--prompts") from error
    if not found:
        raise typer.BadParameter(f"{file} has no prompt; write one a line", param_hint="--prompts")
    return found


def _say(line: str) -> None:
    print(printable(f"rlcore: parity: {line}"), file=sys.stderr, flush=True)


def _print(report: ParityReport) -> None:
    found = report.agreement
    options = "".join(f", {name}={value}" for name, value in report.infer_options.items())
    print(
        printable(f"{report.model}, {report.dtype} on {report.device}: the trainer against {report.sampler}{options}")
    )
    header = ["log-probs", "tokens", "mean |d|", "p99 |d|", "max |d|", "mean d", "ratio mean", "ratio p99", "ratio max"]
    rows = [_row("with routing replay" if report.without_replay else "all", found)]
    rows += [_row("without", report.without_replay)] if report.without_replay else []
    print_table([*header, "samples lost"], rows)
    if report.routes_apart is not None:
        print(f"routers select other experts than the sampler's for {report.routes_apart:.2%} of (token, layer)")
    print_table(
        ["position", "mean |d|", "p99 |d|"],
        [[f"{one.start}-{one.stop - 1}", _number(one.mean), _number(one.p99)] for one in report.positions],
    )
    if report.layers:
        print_table(
            ["part", "kind", "relative difference"], [[p.name, p.kind, _number(p.relative)] for p in report.layers]
        )
        first, largest = report.first, report.largest
        nowhere = "none; they part where the sampler decodes token by token" if found.mean else "none"
        print(f"first difference: {f'{first.name} ({first.kind})' if first else nowhere}")
        print(f"largest growth: {f'{largest.name} ({largest.kind})' if largest else 'none'}")


def _row(name: str, found: LogProbAgreement) -> list[str]:
    values = found.mean, found.p99, found.max, found.bias, found.ratio_mean, found.ratio_p99, found.ratio_max
    return [name, f"{found.tokens:,}", *map(_number, values), f"{found.lost:.2%}"]


def _number(value: float) -> str:
    return f"{value:.4g}"
