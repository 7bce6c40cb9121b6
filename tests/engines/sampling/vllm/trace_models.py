"""Traces vLLM's own loaders of small models, and tests the plans on real instances; prints a line of JSON for each.

test_vllm_loader_traces.py runs it in a process of its own: a worker's place among the ranks is a state of the process,
and is only made up here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_HOST_IP": "127.0.0.1", "TORCH_COMPILE_DISABLE": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
import vllm.distributed.parallel_state as ranks  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from rlcore.engines.sampling.vllm import meta_model as made  # noqa: E402
from rlcore.engines.weight_sync.planning.loader_trace import trace_loader  # noqa: E402
from rlcore.engines.weight_sync.planning.manifest import describe  # noqa: E402
from rlcore.engines.weight_sync.planning.plan import make_plan  # noqa: E402
from rlcore.engines.weight_sync.planning.self_test import run_self_test  # noqa: E402
from rlcore.nn import WeightView  # noqa: E402

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # The first has experts: with it vLLM makes the groups of experts, which stay for all.
    "qwen3_moe": ("Qwen3MoeConfig", BASE | EXPERTS | {"decoder_sparse_step": 1}),
    "mixtral": ("MixtralConfig", BASE | {"num_local_experts": 4}),
    "qwen2": ("Qwen2Config", BASE | {"tie_word_embeddings": False}),
    "qwen2 tied": ("Qwen2Config", BASE | {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", BASE),
    "mistral": ("MistralConfig", BASE),
    "qwen3": ("Qwen3Config", BASE | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", BASE | {"head_dim": 16}),
    "glm4": ("Glm4Config", BASE | {"head_dim": 16, "pad_token_id": 0}),
    "gemma3": ("Gemma3TextConfig", BASE | {"head_dim": 16}),
    "phi3": ("Phi3Config", BASE | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}),
    "mamba2": (
        "Mamba2Config",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "num_heads": 8, "head_dim": 16, "n_groups": 2}
        | {"state_size": 16},
    ),
    "jamba": (
        "JambaConfig",
        BASE | {"num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False}
        | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    ),
    "gpt_oss": ("GptOssConfig", BASE | {"head_dim": 16, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}),
}  # fmt: skip
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
PLACES = {"tp 1": (1, 0, False), "tp 2, first": (2, 0, False), "tp 2, second": (2, 1, False)}
EXPERT_PLACES = {"ep 2, first": (2, 0, True), "ep 2, second": (2, 1, True)}


def checkpoint(folder: Path, kind: str, options: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a small random model, as transformers writes it."""
    config = getattr(transformers, kind)(**options)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found += [(name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()]  # noqa: SIM118
    return found


@contextlib.contextmanager
def placed(config: Any, size: int, rank: int, splits_experts: bool) -> Iterator[None]:
    """Inside, this process seems to be one of ``size`` workers."""
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            ranks.init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
            ranks.initialize_model_parallel(1, 1)
    groups = [ranks._TP, *([ranks._EP] if splits_experts else [])]
    for group in groups:
        group.world_size, group.rank_in_group = size, rank
    config.parallel_config.tensor_parallel_size = size
    try:
        yield
    finally:
        for group in groups:
            group.world_size, group.rank_in_group = 1, 0


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def recorded(config: Any, views: list[WeightView]) -> dict[str, Any]:
    """Return the trace of a loader, and if its plan gives what a load of a real instance leaves."""
    manifest = describe(views, 1).manifest
    recording = trace_loader(*made.meta_model(config), manifest)
    plan = make_plan(recording)
    real: Any = made.new_model(config, DEVICE)
    for parameter in real.parameters():
        parameter.requires_grad_(False)
    return {
        "refusal": recording.refusal,
        "destinations": len(plan.destinations),
        "pieces": len(plan.pieces),
        "fills": len(plan.fills),
        "needed_bytes": plan.needed_bytes,
        "fallback_bytes": plan.fallback_bytes,
        "not_plain": {one.destination.name: one.reason for one in recording.not_plain},
        "failures": list(recording.failures.values()),
        "untouched_parameters": [one.name for one in plan.untouched if one.name in dict(real.named_parameters())],
        "idle": len(recording.idle),
        "wrong": {} if recording.failures else run_self_test(plan, manifest, lambda: named(real), real.load_weights),
        "names": len(views),
    }


def main(folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    for label, (kind, options) in MODELS.items():
        names = checkpoint(folder / label, kind, options)
        tensors = [(name, torch.empty(shape, dtype=torch.bfloat16, device="meta")) for name, shape in names]
        views = [WeightView(name, tensor, tensor) for name, tensor in tensors]
        arguments: dict[str, Any] = {"model": str(folder / label), "skip_tokenizer_init": True, "max_model_len": 128}
        for place, where in (PLACES | (EXPERT_PLACES if label == "qwen3_moe" else {})).items():
            engine = EngineArgs(**arguments, dtype="bfloat16", enforce_eager=True, enable_expert_parallel=where[2])
            config = engine.create_engine_config()
            with placed(config, *where):
                try:
                    found = recorded(config, views)
                except Exception as error:  # the test shows it
                    found = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"model": label, "place": place} | found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
