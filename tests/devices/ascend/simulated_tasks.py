"""What test_simulated.py runs in the environment of the simulated CANN: ``python simulated_tasks.py TASK...``.

The last line of the output has the answer of each task by its name, as JSON; of one that failed, the traceback.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import rlcore
from rlcore.collectives.groups import new_group
from rlcore.errors import RlcoreError, UnsupportedError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from rlcore.packed import choice
from rlcore.packed.attention_call import AttentionCall
from rlcore.rms_norm import use_device_norms
from rlcore.tensor_data import dtype_name
from rlcore.types import IpcHandle

STEPS, RATE = 4, 1e-2


class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    """A tiny one, trained by AdamW."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=RATE, eps=1e-3)


def sharded_training() -> dict[str, Any]:
    """What FSDP2 on two ranks over the real ProcessGroupHCCL learns, and the host alone."""
    folder = _checkpoint()
    return {"npu": _trained(folder, ["npu:0", "npu:1"]), "cpu": _trained(folder, ["cpu:0"])}


def offloaded_training() -> dict[str, Any]:
    """One NPU's losses, with everything moved to the host and back before each step and without."""
    folder, device = _checkpoint(), rlcore.get_device("npu")
    away: list[int] = []

    def move(engine: rlcore.TrainEngine) -> None:
        before = device.memory.stats().allocated_bytes - others
        engine.offload()
        away.append(device.memory.stats().allocated_bytes - others)
        away.append(before)
        engine.onload()

    without = _trained(folder, ["npu:0"])
    gc.collect()
    others = device.memory.stats().allocated_bytes  # no engine's: the mask of the vendor's attention, made once
    with_moves = _trained(folder, ["npu:0"], between=move)
    return {
        "without": without,
        "with moves": with_moves,
        "device bytes away": away[-2],
        "device bytes before": away[-1],
    }


def vendor_format() -> str:
    """What sharing a tensor in format 29 (FRACTAL_NZ) is answered with."""
    import torch_npu

    tensor = torch_npu.empty_with_format((16, 16), dtype=torch.float16, device="npu", acl_format=29)
    try:
        rlcore.get_device("npu").memory.export_ipc(tensor)
    except UnsupportedError as error:
        return str(error)
    return "it was shared"


def refusals() -> dict[str, str]:
    """What is said of a handle of another NPU or host, and of a dtype that no device reduces; and of none of these."""
    device = rlcore.get_device("npu:1")
    tensor = torch.arange(6.0, device=device.torch_device)
    handle = device.memory.export_ipc(tensor)
    elsewhere = dataclasses.replace(handle, boot_id="of another host")
    found = {visible: _opened(handle, visible) for visible in ("1", "0", "0,1")}
    found["another host"] = _opened(elsewhere, "1")
    device.memory.revoke(handle, timeout_s=20)
    group = new_group(device, rank=0, world_size=1, rendezvous=Path(tempfile.mkdtemp()), timeout_s=60)
    for dtype in (torch.float64, torch.complex64):
        values = torch.ones(3, dtype=dtype, device=device.torch_device)
        found[dtype_name(dtype)] = _said(lambda values=values: str(group.all_reduce(values, "max").tolist()))
    group.destroy()
    return found


def between_npus() -> dict[str, str]:
    """What processes that see another NPU, and the same one under another number, say of memory of npu:1."""
    device = rlcore.get_device("npu:1")
    handle = device.memory.export_ipc(torch.arange(3.0, device=device.torch_device))
    found = {visible: _opened(handle, visible) for visible in ("0", "1")}
    device.memory.revoke(handle, timeout_s=20)
    found |= {name: rlcore.get_device(name).properties().uuid for name in ("npu:0", "npu:1")}
    return found | {"told": str(torch.npu.get_device_properties(0).uuid)}


def hccl_options() -> dict[str, Any]:
    """HCCL's own settings of a group that is made with ``init_kwargs``, and what a wrong one is answered with."""
    device = rlcore.get_device("npu")
    found = {}
    for value in (123, "much"):
        kwargs = device.collectives.init_kwargs(timeout_s=60)
        kwargs["pg_options"].hccl_config = {"hccl_buffer_size": value}
        try:
            dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), **kwargs)
            dist.all_reduce(torch.ones(1, device=device.torch_device))
            made = dist.group.WORLD._get_backend(device.torch_device)
            found[str(value)] = made.options.hccl_config["hccl_buffer_size"]
        except RuntimeError as error:
            found[str(value)] = str(error).splitlines()[0]
        dist.destroy_process_group()
    return found


_IMPORTER = """\
import sys, rlcore
from rlcore.types import IpcHandle
handle = IpcHandle.from_bytes(bytes.fromhex(sys.argv[1]))
try:
    with rlcore.get_device("npu:0").memory.import_ipc(handle) as mapping:
        print(mapping.tensor.tolist())
except rlcore.errors.RlcoreError as error:
    print(f"{type(error).__name__}: {error}")
"""


def _opened(handle: IpcHandle, visible: str) -> str:
    """What a process says that sees these NPUs, and takes the handle to be of the first."""
    command = [sys.executable, "-c", _IMPORTER, handle.to_bytes().hex()]
    env = os.environ | {"ASCEND_RT_VISIBLE_DEVICES": visible}
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return told.stdout.strip() or told.stderr


def _said(do: Any) -> str:
    try:
        return str(do())
    except RlcoreError as error:
        return f"{type(error).__name__}: {error}"


def attention() -> dict[str, str | None]:
    """Why the vendor's attention is not taken, by what is asked of it; a trainer's own choice comes last."""
    plain = AttentionCall(4, 2, 16, 16)
    asked = {"causal": plain, "window": plain._replace(window=64), "softcap": plain._replace(softcap=3.0)}
    device = torch.device("npu", 0)
    found = {
        f"{name} {dtype_name(dtype)}": choice.why_not("npu_fusion_attention", call, device, dtype)
        for name, call in asked.items()
        for dtype in (torch.float32, torch.bfloat16)
    }
    return found | {"chosen": choice.choose(frozenset([plain]), device, torch.bfloat16).implementation}


def norms() -> list[str]:
    """What is said of a norm that is as the vendor's, and of one that is not, in two dtypes, once each has run."""
    said: list[str] = []
    logger = logging.getLogger("rlcore.rms_norm")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: said.append(record.getMessage()) is None)
    for dtype in (torch.float32, torch.bfloat16):
        for cls in (Qwen2RMSNorm, GemmaRMSNorm):
            norm = cls(32).to("npu:0", dtype)
            use_device_norms(norm, torch.device("npu", 0))
            norm(torch.ones(2, 32, device="npu:0", dtype=dtype)).sum().backward()
    return said


def _checkpoint() -> Path:
    folder = Path(tempfile.mkdtemp())
    config = Qwen2Config(vocab_size=21, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         tie_word_embeddings=True, dtype="float32")  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def _trained(folder: Path, devices: list[str], between: Any = None) -> dict[str, list[float]]:
    """The loss of each step, and some weights after them."""
    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices=devices, data_parallel_size=len(devices), timeout_s=120)
        losses = []
        for _ in range(STEPS):
            losses.append(engine.train_batch(_batch(), ppo_clip(), max_grad_norm=0.5)["loss"])
            if between is not None:
                between(engine)
        weight = engine.state_dict()["model.layers.0.mlp.down_proj.weight"]
        return {"losses": losses, "weight": weight.flatten().tolist()}


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (12, 3, 7, 9)
    return {
        "input_ids": torch.randint(21, (sum(lengths),), generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "loss_mask": torch.cat([torch.arange(length) for length in lengths]) >= 2,
        "old_logprobs": torch.full((sum(lengths),), -3.0),
        "advantages": torch.randn(len(lengths), generator=generator),
    }


def _answer(name: str) -> Any:
    try:
        return globals()[name]()
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    print(json.dumps({name: _answer(name) for name in sys.argv[1:]}))
