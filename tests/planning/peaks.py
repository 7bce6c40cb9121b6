"""Measure the memory that real train engines take on a device: ``python -m tests.planning.peaks FILE``.

Models have random weights; each is built, scored, trained and evaluated under several options, and the peaks of
torch's allocator go to FILE as JSON. ``tests/planning/compare.py`` sets the plan beside them.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.bench.cases.models import drawn, packed_batch
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
_QWEN_0_5B = _QWEN2 | {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_1_5B = _QWEN2 | {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_7B = _QWEN2 | {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
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
    "qwen2.5-7b-lora": (_QWEN_7B, {"r": 16, "target_modules": _TARGETS}),
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


def _peaks() -> dict[str, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found = {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "used": total - free,
    }
    torch.cuda.reset_peak_memory_stats()
    return found


def _fresh() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure(model: str, setup: str, layers: int | None = None) -> dict[str, Any]:
    """Return the peaks of each phase of one engine."""
    config, lora = MODELS[model]
    if layers is not None:
        config = config | {"num_hidden_layers": layers}
    options = SETUPS[setup]
    batch = packed_batch(config["vocab_size"], options["lengths"], seed=0)
    most, loss_fn = options["max_tokens"], ppo_clip()
    _fresh()
    found: dict[str, Any] = {"model": model, "setup": setup, "layers": layers, "before": _peaks()}
    engine = rlcore.TrainEngine(module_of(config, lora))
    with engine:
        engine.build(devices=["cuda:0"], launcher="inline", timeout_s=300.0, **options["build"])
        found["build"] = _peaks()
        for number in (1, 2):
            started = time.perf_counter()
            metrics = engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=most)
            found[f"train {number}"] = _peaks() | {"seconds": time.perf_counter() - started, "loss": metrics["loss"]}
        if options.get("offload"):
            engine.offload("optimizer")
            found["offloaded"] = _peaks()
        started = time.perf_counter()
        engine.forward_logprobs(batch, max_tokens_per_micro_batch=most)
        found["score"] = _peaks() | {"seconds": time.perf_counter() - started}
        engine.eval_batch(batch, loss_fn, max_tokens_per_micro_batch=most)
        found["evaluate"] = _peaks()
        engine.offload()
        _fresh()
        found["all offloaded"] = _peaks()
    return found


def _forget(error: BaseException | None) -> None:
    """Drop the frames of an error, which hold the tensors of its engine."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def main(file: str, *names: str) -> None:
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)
    about = {
        "device": properties.name,
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "cores": properties.multi_processor_count,
        "total": torch.cuda.mem_get_info()[1],
    }
    runs: list[dict[str, Any]] = []
    chosen = [model for model in MODELS if not names or model in names]
    jobs = [(model, setup) for setup in list(SETUPS)[-4:] for model in chosen]
    for model, setup in sorted(jobs, key=lambda job: "7b" in job[0]):  # the largest last
        started = time.perf_counter()
        try:
            runs.append(measure(model, setup))
        except Exception as error:
            traceback.print_exc()
            runs.append({"model": model, "setup": setup, "error": f"{type(error).__name__}: {error}"})
            _forget(error)
        one = runs[-1]
        peak = one.get("train 2", {}).get("peak", 0) / 2**30
        print(f"{model:20} {setup:24} {peak:7.2f} GiB  {time.perf_counter() - started:5.1f} s", flush=True)
        Path(file).write_text(json.dumps({"about": about, "runs": runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
