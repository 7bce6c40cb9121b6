"""Run out of memory on a GPU, and follow the advice of the error: ``python -m tests.planning.out_of_memory FOLDER``.

The trainer is alone with other memory first. With ``--vllm`` a vLLM that is on the device has the memory instead.
FOLDER gets what each error says, and the snapshot of the allocator stays where the error says.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import rlcore
from rlcore.bench.cases.models import QWEN_0_5B, Folder, packed_batch
from rlcore.errors import RlcoreError
from rlcore.ops import ppo_clip
from tests.planning.peaks import MODELS, module_of

_ROOM = 24 << 30
"""Bytes that are left to the engine."""


@contextmanager
def _filler() -> Iterator[None]:
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - _ROOM, dtype=torch.uint8, device="cuda")
    yield
    del filler


@contextmanager
def _vllm() -> Iterator[None]:
    """A sampler whose KV cache leaves as much."""
    folder = Folder(QWEN_0_5B, torch.bfloat16, rlcore.get_device())
    free, _ = torch.cuda.mem_get_info()
    with rlcore.InferenceEngine(folder.path, executor="vllm") as infer:
        kv_bytes = free - _ROOM - (4 << 30)
        infer.build(devices="cuda:0", enforce_eager=True, max_model_len=2048, kv_cache_memory_bytes=kv_bytes)
        yield
    folder.close()


def _follow(file: Path) -> None:
    config, lora = MODELS["qwen2.5-0.5b"]
    batch, loss_fn = packed_batch(config["vocab_size"], [1024] * 48, seed=0), ppo_clip()
    with rlcore.TrainEngine(module_of(config, lora)) as engine:
        engine.build(devices=["cuda:0"], launcher="inline", compute_dtype="bfloat16")
        started = time.perf_counter()
        try:
            engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=32_768)
            raise SystemExit("it fitted")
        except RlcoreError as error:
            said = "\n\n".join([str(error), *error.__notes__])
        file.write_text(said)
        shown = " ".join(part for part in (said.partition("Traceback")[0], *said.split("\n\n")[-2:]))
        print(f"{time.perf_counter() - started:.1f} s\n{shown}", flush=True)
        (snapshot,) = re.findall(r"is in (\S+\.pickle)", said)
        print(f"the snapshot has {Path(snapshot).stat().st_size} bytes", flush=True)
        tokens = int(re.findall(r"It fits with max_tokens_per_micro_batch=(\d+)", said)[-1])
        for most in (tokens, 2 * tokens):
            try:
                engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=most)
                print(f"{most} tokens fit", flush=True)
            except RlcoreError:
                print(f"{most} tokens do not fit", flush=True)


def main(folder: str, *options: str) -> None:
    has_vllm = "--vllm" in options
    with _vllm() if has_vllm else _filler():
        _follow(Path(folder, "vllm.txt" if has_vllm else "filler.txt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
