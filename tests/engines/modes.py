"""Measures what modes that give the same bits cost on a GPU: ``python -m tests.engines.modes FILE``.

The train engine with ``deterministic=True``: a step of a 1.5B and of a mixture of experts, twice from the same start.
vLLM with ``batch_invariant=True``: a batch of a 1.5B, and whether a prompt's log-probs depend on its batch. Each engine
has a process of its own. On a host models are tiny.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.bench.cases.models import QWEN_1_5B, TINY, Folder, packed_batch
from rlcore.device import Device
from rlcore.ops import ppo_clip
from tests.planning.peaks import MODELS, module_of

_STEPS, _SAMPLINGS = 6, 3
_LENGTHS = [1900, 1100, 900, 700, 640, 380, 250, 130]
_SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip


def of_trainer(model: str, *, deterministic: bool) -> dict[str, Any]:
    """Return the seconds of steps, and the gradient norms of the steps of two engines, which are to be the same."""
    device = rlcore.get_device()
    config, _ = MODELS[model]
    if device.spec.is_host:
        config = config | _SMALL
    batch, norms, seconds = packed_batch(config["vocab_size"], _LENGTHS, seed=0), [], []
    for _ in range(2):
        with rlcore.TrainEngine(module_of(config, None, device.type)) as engine:
            dtype = {} if device.spec.is_host else {"compute_dtype": "bfloat16"}
            engine.build(devices=[device.name], launcher="inline", deterministic=deterministic, **dtype)
            norms.append([])
            for _ in range(_STEPS):
                device.synchronize()
                started = time.perf_counter()
                metrics = engine.train_batch(batch, ppo_clip(), max_tokens_per_micro_batch=6000)
                device.synchronize()
                seconds.append(time.perf_counter() - started)
                norms[-1].append((metrics["loss"], metrics["grad_norm"]))
    return {"step_s": statistics.median(seconds), "same_bits": norms[0] == norms[1], "norms": norms}


def of_sampler(*, batch_invariant: bool) -> dict[str, Any]:
    """Return the rate of sampling, and whether a prompt's log-probs are the same alone and in a batch."""
    device: Device = rlcore.get_device()
    is_host = device.spec.is_host
    shape = TINY if is_host else QWEN_1_5B
    folder = Folder(shape, torch.float32 if is_host else torch.bfloat16, device)
    count, tokens = (4, 8) if is_host else (64, 256)
    prompts = torch.randint(shape.vocabulary, (count, 128), generator=torch.Generator().manual_seed(0)).tolist()
    params = {"n": 1, "max_tokens": tokens, "ignore_eos": True, "seed": 1}
    options = {"batch_invariant": True} if batch_invariant else {}
    with rlcore.InferenceEngine(folder.path, executor="vllm") as infer:
        infer.build(
            devices=device.name, max_model_len=1024, kv_cache_memory_bytes=1 << 26 if is_host else 8 << 30, **options
        )
        seconds = []
        for _ in range(_SAMPLINGS):
            started = time.perf_counter()
            outputs = infer.generate(prompts, params, progress=False)
            seconds.append(time.perf_counter() - started)
        (alone,) = infer.generate(prompts[:1], params, progress=False)
    folder.close()
    one, other = outputs[0].outputs[0], alone.outputs[0]
    same_tokens = next(
        (i for i, pair in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if len(set(pair)) > 1), tokens
    )
    same = list(one.logprobs[:same_tokens]) == list(other.logprobs[:same_tokens])
    rate = count * tokens / statistics.median(seconds)
    return {
        "token_per_s": rate,
        "seconds": seconds,
        "same_bits": same and same_tokens == tokens,
        "same_tokens": same_tokens,
    }


def main(file: str) -> None:
    found: dict[str, Any] = {}
    for what in ("qwen2.5-1.5b", "qwen3-moe-0.9b", "vllm"):
        for mode in ("plain", "on"):
            command = [sys.executable, "-m", "tests.engines.modes", "--one", what, mode]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            key = f"{what} {mode}"
            found[key] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-2000:]
            shown = found[key]
            if isinstance(shown, dict):
                shown = {name: value for name, value in shown.items() if name not in ("norms", "seconds")}
            print(key, shown, flush=True)
            Path(file).write_text(json.dumps(found))


def _one(what: str, mode: str) -> None:
    is_on = mode == "on"
    found = of_sampler(batch_invariant=is_on) if what == "vllm" else of_trainer(what, deterministic=is_on)
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        _one(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
