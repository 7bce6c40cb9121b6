"""One long sequence over workers that share it, beside one worker: the same log-probs, loss, gradients and weights.

``python -m tests.engines.long_sequence --tokens 8192 --workers 4`` trains a Qwen2 for a step on CPUs, with the
hidden and inner size and the layers of a 0.5B, and heads of 56 values, which divide by the workers.
``--sizes tensor_parallel_size=2 ...`` takes other sizes of ``build()``. The time of attention grows with the square of
the length: on 131,072 tokens each layer of 16 heads takes 1e14 operations a step. ``--heads 4`` makes that a quarter at
the same width, ``--vocabulary`` makes the output head smaller, ``--no-recompute`` keeps all activations, and
``--no-logprobs`` leaves out a forward pass of its own. ``--save FILE`` ends after the one worker and keeps its results,
``--beside FILE`` takes them instead of running it: two runs of half the time, on any machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

import rlcore
from rlcore.bench.cases.models import QWEN_0_5B, TINY, ModelShape, packed_batch, policy, policy_class
from rlcore.ops import ppo_clip

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file


class Found(NamedTuple):
    """The results of one engine."""

    logprobs: Tensor | None
    metrics: dict[str, float]
    weights: dict[str, Tensor]
    step_s: float
    peak_bytes: int
    """The most resident memory of a worker."""


def policy_of(shape: ModelShape) -> Any:
    class Watched(policy_class(shape)):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)  # weights then differ as gradients do

        def peak_bytes(self) -> int:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    return policy(shape, torch.float32, "cpu", Watched)


def run(shape: ModelShape, given: argparse.Namespace, sizes: dict[str, int]) -> Found:
    tokens = given.tokens
    batch, number = packed_batch(shape.vocabulary, [tokens], seed=0), math.prod(sizes.values())
    limit = {"max_tokens_per_micro_batch": tokens}
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // number))  # of the workers
    with rlcore.TrainEngine(policy_of(shape)) as engine:
        devices = [f"cpu:{index}" for index in range(number)]
        own = {"activation_checkpointing": given.recompute, "timeout_s": given.timeout_s}
        engine.build(devices=devices, launcher="process", **own, **sizes)
        logprobs = engine.forward_logprobs(batch, **limit) if given.logprobs else None
        started = time.perf_counter()
        metrics = engine.train_batch(batch, ppo_clip(), max_grad_norm=None, **limit)
        step_s = time.perf_counter() - started
        return Found(logprobs, metrics, engine.state_dict(), step_s, max(engine.call("peak_bytes")))


def kept(found: Found, of: dict[str, Any], file: Path) -> None:
    torch.save({"of": of, "found": found._asdict()}, file)


def read(file: Path, of: dict[str, Any]) -> Found:
    """Return what ``kept`` wrote; results ``of`` another sequence or model are refused."""
    there = torch.load(file, weights_only=True)
    if there["of"] != of:
        raise SystemExit(f"{file} has the results of {there['of']}; this run is of {of}")
    return Found(**there["found"])


def compared(one: Found, several: Found) -> dict[str, float]:
    """Return how far the two are apart: of weights, whose steps are gradients, the norm over that of the gradients."""
    norm = one.metrics["grad_norm"]
    apart = sum(float((one.weights[name] - held).double().square().sum()) for name, held in several.weights.items())
    of_logprobs = {}
    if one.logprobs is not None and several.logprobs is not None:
        of_logprobs["logprob"] = float((one.logprobs - several.logprobs).abs().max())
    return of_logprobs | {
        "loss": abs(one.metrics["loss"] - several.metrics["loss"]),
        "grad_norm": abs(norm - several.metrics["grad_norm"]) / norm,
        "weights": math.sqrt(apart) / norm,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--heads", type=int, default=0, help="of queries; 0: 16, or 4 of the tiny shape")
    parser.add_argument("--vocabulary", type=int, default=0, help="0: that of the shape")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--logprobs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sizes", nargs="*", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--save", type=Path, metavar="FILE", help="run the one worker alone, and write its results")
    parts.add_argument("--beside", type=Path, metavar="FILE", help="run the several alone, beside the one's results")
    given = parser.parse_args(arguments)
    heads = given.heads or (4 if given.tiny else 16)  # the 14 of the 0.5B do not divide
    shape = replace(TINY, heads=heads) if given.tiny else replace(QWEN_0_5B, heads=heads, head_size=56)
    shape = replace(shape, layers=given.layers or shape.layers, vocabulary=given.vocabulary or shape.vocabulary)
    sizes = {name: int(number) for name, _, number in (one.partition("=") for one in given.sizes)}
    sizes = sizes or {"sequence_parallel_size": given.workers}
    of = asdict(shape) | {"tokens": given.tokens}
    one = run(shape, given, {}) if given.beside is None else read(given.beside, of)
    print(f"one worker: {one.step_s:.0f} s, {one.peak_bytes / 2**30:.1f} GiB", file=sys.stderr, flush=True)
    if given.save is not None:
        kept(one, of, given.save)
        return {}
    several = run(shape, given, sizes)
    found = {
        "tokens": given.tokens,
        "layers": shape.layers,
        "heads": shape.heads,
        "vocabulary": shape.vocabulary,
        "sizes": sizes,
        "apart": compared(one, several),
        "step_s": [one.step_s, several.step_s],
        "peak_GiB_a_worker": [one.peak_bytes / 2**30, several.peak_bytes / 2**30],
    }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
