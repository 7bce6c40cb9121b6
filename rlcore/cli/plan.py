"""The command ``rlcore plan``: what a program would get and take, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlcore.cli.console import AsJson, given_path, print_json, print_table
from rlcore.cli.placement import Asked, placement, placement_rows
from rlcore.torch_import import import_torch

_RECOMPUTE = {"off": False, "selective": "selective", "on": True}
_OPTIMIZERS: dict[str, dict[str, bool]] = {"adamw": {}, "adamw-fused": {"fused": True}}
_OF_MODEL = (
    "count", "memory", "longest", "prompt_tokens", "max_tokens", "recompute", "replicas", "sequence_parallel",
    "lora", "dtype", "compute_dtype", "optimizer", "record", "no_sampler",
)  # fmt: skip
_OF_HOSTS = ("apart", "num_hosts", "strategy", "label", "host", "address")
_GIB = 2**30


def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            parser=lambda text: str(given_path(text)),
            help="A model folder, its config.json, or a file of rlcore train (.yaml).",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help='With MODEL such as "h200" or "cpu", else a kind such as "cuda"; else the best here.'),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Devices, which trainer and sampler share in turns.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, max=1 << 20, help="GiB of each device, if not as in the table.")
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the longest sequence.", show_default="4096")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens of it that are not trained on.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a micro-batch; else it is looked for.")
    ] = None,
    recompute: Annotated[str | None, typer.Option(help="off, selective or on; else it is looked for.")] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies of the trainer; else they are looked for.")
    ] = None,
    sequence_parallel: Annotated[
        int | None, typer.Option(min=1, help="Devices of the trainer that share sequences; else 1, and more if needed.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Devices of one copy of the sampler, which are of one host.")
    ] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="Rank of adapters on all linear layers.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of trained weights: float32 or bfloat16.")] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="Of computing.", show_default="bfloat16")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or adamw-fused.", show_default="adamw-fused")] = None,
    no_sampler: Annotated[bool, typer.Option("--no-sampler", help="Plan the trainer alone.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="A file of rlcore bench, from which seconds are computed.", metavar="FILE")
    ] = None,
    train: Annotated[int, typer.Option(min=0, help="Workers of the train engine, to print where they go.")] = 0,
    infer: Annotated[int, typer.Option(min=0, help="Devices of the inference engine, to print where they are.")] = 0,
    apart: Annotated[
        bool, typer.Option("--apart", help="The inference engine avoids the trainer's devices; else it shares them.")
    ] = False,
    num_hosts: Annotated[int | None, typer.Option(min=1, help="Hosts of the train engine, alike on each.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Of the train engine: pack or spread.", show_default="pack")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Label that hosts must have; repeat.", metavar="KEY=VALUE")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help='A host to plan for, such as "host-a=cuda:8"; repeat.', metavar="NAME=KIND:COUNT"),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help='The Ray cluster to plan for; "auto" is that of this host.')
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the memory that a step would take, and the devices that engines would get. Nothing is started.

    With MODEL: bytes of each phase on each device, from its config.json alone, what to offload and when, the largest
    micro-batch, and the best layouts. With --train or --infer: the devices that build() would choose, on this host or
    on those of --host or --address.
    """
    import_torch()
    given = context.params
    if model is None and not train and not infer:
        raise typer.BadParameter("give a model, or the size of an engine: --train or --infer", param_hint="--train")
    if model is None and (lost := next((name for name in _OF_MODEL if given[name] not in {None, False}), None)):
        raise typer.BadParameter(
            "it is for a plan of memory, which needs MODEL", param_hint=f"--{lost.replace('_', '-')}"
        )
    if not train and not infer and (lost := next((name for name in _OF_HOSTS if given[name]), None)):
        raise typer.BadParameter(
            "it is for the places of engines: give --train or --infer", param_hint=f"--{lost.replace('_', '-')}"
        )
    found: dict[str, Any] = {}
    if model is not None:
        planned = _memory(model, given, train)
        found |= planned.as_dict()
    if train or infer:
        kind = device if model is None else None
        found |= placement(
            Asked(train, infer, tensor_parallel or 1, apart, num_hosts, strategy, label, kind, host, address)
        )
    if as_json:
        print_json(found)
        return
    if model is not None:
        print(planned)
    if train or infer:
        print_table(["engine", "host", "ranks", "devices"], placement_rows(found["placement"]))


def _memory(model: str, given: dict[str, Any], train: int) -> Any:
    from rlcore.planning.configuration import arguments_of
    from rlcore.planning.plan import plan as planned

    for name, known in (("recompute", _RECOMPUTE), ("optimizer", _OPTIMIZERS)):
        if given[name] is not None and given[name] not in known:
            raise typer.BadParameter(
                f"it must be one of {', '.join(known)}, got {given[name]!r}", param_hint=f"--{name}"
            )
    arguments: dict[str, Any] = arguments_of(model) if model.endswith((".yaml", ".yml")) else {"model": model}
    names = ("device", "count", "longest", "prompt_tokens", "max_tokens", "lora", "record")
    sizes = ("replicas", "sequence_parallel", "tensor_parallel")
    arguments |= {name: given[name] for name in (*names, *sizes) if given[name] is not None}
    if given["recompute"] is not None:
        arguments["recompute"] = _RECOMPUTE[given["recompute"]]
    if given["memory"] is not None:
        arguments["memory_bytes"] = int(given["memory"] * _GIB)
    if given["no_sampler"]:
        arguments["sampler"] = False
    if train:
        arguments.setdefault("count", train)
    dtypes = {name: given[name] for name in ("dtype", "compute_dtype") if given[name] is not None}
    if dtypes:
        arguments["options"] = {"compute_dtype": "bfloat16"} | arguments.get("options", {}) | dtypes
    if given["optimizer"] is not None:
        from rlcore.planning.model import adamw_of

        arguments["optimizer"] = adamw_of(**_OPTIMIZERS[given["optimizer"]])
    return planned(**arguments)
