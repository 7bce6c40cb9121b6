"""Measure the memory that real train engines take on a GPU, beside its plan: ``python -m tests.planning.peaks FILE``.

Six models with random weights under four configurations, each in a process of its own. All processes plan at once; they
measure one after another, so that no two are on the GPU together. FILE gets all as JSON. ``--again FILE`` plans what
FILE measured again, without a GPU, and prints the rows of docs/plan.md; ``peaks_h200.json`` is such a file.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.bench.cases.models import drawn, packed_batch
from rlcore.engines.executors.gradient_sums import GradientSums
from rlcore.engines.executors.micro_batch import micro_batches
from rlcore.engines.fsdp2.sharding import Sharding
from rlcore.engines.memory_plan.trainer import PlannedTrainer, batch_of, score_options, step_options
from rlcore.engines.rank_batch import rank_batches
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from rlcore.planned import PlannedDevice

_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
_QWEN_0_5B = _QWEN2 | {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_1_5B = _QWEN2 | {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
_GEMMA_1B = {
    "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "sliding_window": 512, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN3_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 4096,
    "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}  # fmt: skip
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "qwen2.5-0.5b": (_QWEN_0_5B, None),
    "qwen2.5-1.5b": (_QWEN_1_5B, None),
    "llama-3.2-1b": (_LLAMA_1B, None),
    "gemma3-1b": (_GEMMA_1B, None),
    "qwen3-moe-0.9b": (_QWEN3_MOE, None),
    "qwen2.5-1.5b-lora": (_QWEN_1_5B, {"r": 16, "target_modules": _TARGETS}),
}
"""The configuration of each model, and the arguments of its LoRA."""

_UNEVEN = [2048, 1536, 1024, 1024, 768, 512, 512, 256, 256, 128, 64, 64]  # 8192 tokens
_OTHER = [1900, 1100, 900, 700, 640, 380, 250, 130]  # 6000 tokens
SETUPS: dict[str, dict[str, Any]] = {
    "recompute, 8k": {
        "build": {"activation_checkpointing": True, "compute_dtype": "bfloat16"},
        "lengths": _UNEVEN * 3, "max_tokens": 8192,
    },
    "selective, 4k": {
        "build": {"activation_checkpointing": "selective", "compute_dtype": "bfloat16"},
        "lengths": [1024, 768, 512, 512, 512, 256, 256, 256] * 2, "max_tokens": 4096,
    },
    "bfloat16, 32k, offload": {
        "build": {"activation_checkpointing": True, "dtype": "bfloat16"},
        "lengths": [4096] * 6 + _UNEVEN * 5, "max_tokens": 32_768, "offload": True,
    },
    "recompute, 12k": {
        "build": {"activation_checkpointing": True, "compute_dtype": "bfloat16"},
        "lengths": _OTHER * 4, "max_tokens": 12_000,
    },
    "keep, 3k": {
        "build": {"activation_checkpointing": False, "compute_dtype": "bfloat16"},
        "lengths": [1100, 900, 700, 300] * 2, "max_tokens": 3000,
    },
    "selective, 6k": {
        "build": {"activation_checkpointing": "selective", "compute_dtype": "bfloat16"},
        "lengths": _OTHER * 2, "max_tokens": 6000,
    },
    "bfloat16, 24k, offload": {
        "build": {"activation_checkpointing": True, "dtype": "bfloat16"},
        "lengths": [5000] * 4 + [1000] * 4 + _OTHER * 4, "max_tokens": 24_000, "offload": True,
    },
}  # fmt: skip
"""The options of ``build``, the lengths of the sequences of a step, and the most tokens of a micro-batch."""


def module_of(config: dict[str, Any], lora: dict[str, Any] | None, device_type: str = "cuda") -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    made = AutoConfig.for_model(**config)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]

    class Policy(HuggingFaceTrainModule, model_class):  # type: ignore[misc,valid-type]
        def materialization_source(self) -> Any:
            return drawn(self, torch.bfloat16, device_type)

        def on_weights_materialized(self) -> None:
            trained = [one for one in self.parameters() if one.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    with rlcore.meta_device():
        module = Policy._from_config(made)
        if lora is not None:
            import peft

            module.add_adapter(peft.LoraConfig(**lora))
    module.output_head()  # as from_pretrained does
    return module


@contextmanager
def as_recorded() -> Iterator[None]:
    """Plan the engines of the records there are, which added up gradients of bfloat16 weights in bfloat16."""
    widen, GradientSums.widen = GradientSums.widen, lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        GradientSums.widen = widen  # type: ignore[method-assign]


CONFIGURATIONS = list(SETUPS)[-4:]
"""The setups that are measured; the others are those of earlier records in tests."""
_AT_ONCE = 8
"""Processes that import and plan side by side."""


def fullest(lengths: list[int], most: int) -> int:
    """Return the tokens of the largest micro-batch of a step: the engine makes them even."""
    (whole,) = rank_batches(batch_of(lengths), 1, most)
    parts = micro_batches(whole, torch.ones(sum(lengths), dtype=torch.bool), most, torch.device("cpu"))
    return max(int(part.cu_rows[-1]) + len(part.cu_rows) - 1 for part in parts)  # the last token of each has no row


def planned(model: str, setup: str) -> dict[str, Any]:
    """Return the peaks of the two steps and of scoring, by plans of the engine's own steps and by ``rlcore.plan``."""
    (config, lora), options = MODELS[model], SETUPS[setup]
    most, lengths = options["max_tokens"], options["lengths"]
    trainer = PlannedTrainer(module_of(config, lora), Sharding(**options["build"]), PlannedDevice("cuda", 132, 90))
    batch, loss_fn = batch_of(lengths), ppo_clip()
    peaks = {f"train {number}": trainer.train(batch, loss_fn, step_options(most)) for number in (1, 2)}
    if not options.get("offload"):  # it would have another peak with the optimizer away
        peaks["score"] = trainer.score(batch, score_options(most))
    found = {name: {"peak": one.allocated, "reserved": one.reserved} for name, one in peaks.items()}
    return found | {"plan()": answered(model, setup)}


def answered(model: str, setup: str) -> dict[str, int]:
    """Return the memory of the trainer's process by ``rlcore.plan``, in tensors and in segments of the allocator."""
    (config, lora), options = MODELS[model], SETUPS[setup]
    build = dict(options["build"])
    recompute = build.pop("activation_checkpointing")
    plan = rlcore.plan(
        module_of(config, lora),
        device="h200",
        longest=max(options["lengths"]),
        max_tokens=fullest(options["lengths"], options["max_tokens"]),  # which is planned full
        recompute=recompute,
        sampler=False,
        options=build,
    )
    (train,) = (phase for phase in plan.best.phases if phase.name == "train")
    reserved = train.device_bytes - train.parts["contexts"]
    return {"peak": reserved - train.parts["kept by the allocator"], "reserved": reserved}


def _peaks() -> dict[str, int]:
    torch.cuda.synchronize()
    found = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    torch.cuda.reset_peak_memory_stats()
    return found


def measured(model: str, setup: str, events: Path | None = None) -> dict[str, Any]:
    """Return the peaks of each phase of one engine, in this process, which must be new.

    Args:
        events: gets what the allocator was asked for in order, as JSON: bytes, less than 0 where they were freed.
    """
    (config, lora), options = MODELS[model], SETUPS[setup]
    batch = packed_batch(config["vocab_size"], options["lengths"], seed=0)
    most, loss_fn = options["max_tokens"], ppo_clip()
    found: dict[str, Any] = {}
    if events is not None:
        torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=1_000_000)  # type: ignore[no-untyped-call]
    engine = rlcore.TrainEngine(module_of(config, lora))
    with engine:
        engine.build(devices=["cuda:0"], launcher="inline", timeout_s=300.0, **options["build"])
        found["build"] = _peaks()
        for number in (1, 2):
            engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=most)
            found[f"train {number}"] = _peaks()
        if events is not None:
            _write_events(events)
        if not options.get("offload"):
            engine.forward_logprobs(batch, max_tokens_per_micro_batch=most)
            found["score"] = _peaks()
            return found
        free_before, _ = torch.cuda.mem_get_info()
        engine.offload()
        gc.collect()
        torch.cuda.empty_cache()
        free_now, _ = torch.cuda.mem_get_info()
        found["offloaded"] = {"peak": torch.cuda.memory_allocated(), "freed": free_now - free_before}
    return found


def _write_events(file: Path) -> None:
    (trace,) = (one for one in torch.cuda.memory._snapshot()["device_traces"] if one)  # type: ignore[no-untyped-call]
    signs = {"alloc": 1, "free_completed": -1, "segment_alloc": 1, "segment_free": -1}
    kept = [(one["action"], one["addr"], signs[one["action"]] * one["size"]) for one in trace if one["action"] in signs]
    file.write_text(json.dumps([[action.startswith("segment"), addr, size] for action, addr, size in kept]))


def _one(model: str, setup: str, lock: str, events: str) -> None:
    """Plan, wait for the GPU, measure; print both as JSON."""
    plan = planned(model, setup)
    with Path(lock).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        started = time.perf_counter()
        real = measured(model, setup, Path(events) if events else None)
        seconds = time.perf_counter() - started
    print(json.dumps({"model": model, "setup": setup, "planned": plan, "measured": real, "seconds": seconds}))


def _in_process(model: str, setup: str, lock: str, events: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.planning.peaks", "--one", model, setup, lock, events]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"model": model, "setup": setup, "error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(run: dict[str, Any]) -> str:
    if "error" in run:
        return f"{run['model']:18} {run['setup']:22} {run['error']}"
    plan, real = run["planned"], run["measured"]
    texts = [
        f"{phase} {_beside(plan[phase]['peak'], real[phase]['peak'])}"
        for phase in ("train 2", "score")
        if phase in plan
    ]
    texts.append(f"segments {_beside(plan['train 2']['reserved'], real['train 2']['reserved'])}")
    texts.append(f"plan() {_beside(plan['plan()']['reserved'], real['train 2']['reserved'])}")
    return f"{run['model']:18} {run['setup']:22} {'  '.join(texts)}  {run['seconds']:.0f} s"


def _beside(plan: int, real: int) -> str:
    return f"{plan / 2**30:.2f}/{real / 2**30:.2f} {plan / real - 1:+.1%}"


def rows(file: Path) -> Iterator[str]:
    """Yield the rows of docs/plan.md, GiB: planned now and measured then, in tensors and in segments."""
    for run in json.loads(file.read_text())["runs"]:
        real = run["measured"]["train 2"]
        with as_recorded():
            plan = answered(run["model"], run["setup"])
        cells = [
            f"{plan[name] / 2**30:.2f} | {real[name] / 2**30:.2f} | {plan[name] / real[name] - 1:+.1%}"
            for name in ("peak", "reserved")
        ]
        yield " | ".join([f"| {run['model']} | {run['setup']}", *cells]) + " |"


def main(file: str, *names: str) -> None:
    about = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
    }
    chosen = [model for model in MODELS if not names or model in names]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting = []
        for setup in CONFIGURATIONS:
            for model in chosen:
                is_told = (model, setup) == ("qwen3-moe-0.9b", "bfloat16, 24k, offload")  # which is planned worst
                events = str(Path(file).with_suffix(".events.json")) if is_told else ""
                waiting.append(pool.submit(_in_process, model, setup, str(Path(folder, "lock")), events))
        for one in as_completed(waiting):
            runs.append(one.result())
            print(_line(runs[-1]), flush=True)
            Path(file).write_text(json.dumps({"about": about, "runs": runs}))


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        _one(*sys.argv[2:])
    elif sys.argv[1] == "--again":
        for row in rows(Path(sys.argv[2])):
            print(row, flush=True)
    else:
        main(*sys.argv[1:])
