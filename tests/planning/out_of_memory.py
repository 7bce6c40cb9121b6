"""Run out of memory on a GPU, and follow the advice of the error: ``python -m tests.planning.out_of_memory``."""

from __future__ import annotations

import re
import time

import torch

import rlcore
from rlcore.bench.cases.models import packed_batch
from rlcore.errors import RlcoreError
from rlcore.ops import ppo_clip
from tests.planning.peaks import MODELS, module_of

_ROOM = 24 << 30
"""Bytes that are left to the engine."""


def main() -> None:
    config, lora = MODELS["qwen2.5-0.5b"]
    batch, loss_fn = packed_batch(config["vocab_size"], [1024] * 48, seed=0), ppo_clip()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - _ROOM, dtype=torch.uint8, device="cuda")
    with rlcore.TrainEngine(module_of(config, lora)) as engine:
        engine.build(devices=["cuda:0"], launcher="inline", compute_dtype="bfloat16")
        started = time.perf_counter()
        try:
            engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=32_768)
            raise SystemExit("it fitted")
        except RlcoreError as error:
            said = " ".join([str(error).partition("Traceback")[0], *error.__notes__])
        print(f"{time.perf_counter() - started:.1f} s\n{said}", flush=True)
        tokens = int(re.findall(r"It fits with max_tokens_per_micro_batch=(\d+)", said)[-1])
        for most in (tokens, 2 * tokens):
            try:
                engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=most)
                print(f"{most} tokens fit: peak {torch.cuda.max_memory_allocated() - filler.nbytes} bytes", flush=True)
            except RlcoreError:
                print(f"{most} tokens do not fit", flush=True)


if __name__ == "__main__":
    main()
