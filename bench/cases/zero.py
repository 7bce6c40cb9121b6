"""An optimizer step under DeepSpeed's ZeRO: rlcore's executor, FSDP2, and DeepSpeed's engine in a loop of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work
from rlcore.bench.cases.models import LEARNING_RATE, Folder, Load, learner, load_on, transformers_class
from rlcore.bench.cases.reinforcement import check_trained
from rlcore.bench.cases.train_steps import CLIP_HIGH, CLIP_LOW, clipped_gain
from rlcore.device import Device
from rlcore.engines.deepspeed.library import check_installed, deepspeed_for
from rlcore.engines.deepspeed.options import ZeroOptions
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.tensor_data import dtype_name

_STAGES = (2, 3)


def _prepare(device: Device) -> Work:
    check_installed()
    load = load_on(device)
    held = contextlib.ExitStack()
    folder = held.enter_context(contextlib.closing(Folder(load.model, load.dtype, device)))
    batch = load.train_batch()
    num_tokens = int(batch["attention_mask"].sum())

    def contender(name: str, executor: str, **options: Any) -> Contender:
        engine = TrainEngine(learner(folder.path), executor=executor)
        held.enter_context(engine.build(devices=device.name, compute_dtype=dtype_name(load.dtype), **options))
        loss = ppo_clip(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
        return Contender(name, lambda: engine.train_batch(batch, loss), check_trained)

    contenders = [contender("fsdp2", "fsdp2")]
    contenders += [contender(f"deepspeed, ZeRO {stage}", "deepspeed", stage=stage) for stage in _STAGES]
    # One alone: two engines of a process would share DeepSpeed's globals.
    plain = held.enter_context(contextlib.closing(_PlainLoop(device, load, folder)))
    contenders.append(Contender(f"plain DeepSpeed, ZeRO {plain.stage}", lambda: plain.step(batch), check_trained))
    return Work(tuple(contenders), {**load.params, "tokens": num_tokens, "devices": 1}, close=held.close)


class _PlainLoop:
    """A policy-gradient step as users of DeepSpeed write it: padded rows through the model's own forward."""

    stage = _STAGES[0]

    def __init__(self, device: Device, load: Load, folder: Folder) -> None:
        library = deepspeed_for(device)
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(device.collectives.backend, store=store, rank=0, world_size=1)
        model = transformers_class("Qwen2ForCausalLM").from_pretrained(folder.path, dtype=load.dtype)
        options = ZeroOptions(stage=self.stage, compute_dtype=dtype_name(load.dtype))
        config = options.deepspeed_config(sum(one.numel() for one in model.parameters()))
        config |= {"gradient_clipping": 1.0, "managed_gradient_accumulation": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._engine, *_ = library.initialize(
            model=model.to(device.torch_device), optimizer=optimizer, config=config, dist_init_required=False
        )
        self._device = device.torch_device

    def step(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        there = {name: entry.to(self._device) for name, entry in batch.items()}
        logits = self._engine(input_ids=there["input_ids"], attention_mask=there["attention_mask"]).logits
        logprob = logits[:, :-1].float().log_softmax(-1).gather(2, there["input_ids"][:, 1:, None])[..., 0]
        mask = there["loss_mask"][:, 1:]
        gain = clipped_gain(logprob, there["old_logprobs"][:, 1:], there["advantages"][:, None])
        loss = -(gain * mask).sum() / mask.sum()
        self._engine.backward(loss)
        self._engine.step()
        return {"loss": float(loss.detach()), "grad_norm": float(self._engine.get_global_grad_norm())}

    def close(self) -> None:
        self._engine.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()


cases = (
    Case(
        "train/zero",
        "one optimizer step of a Qwen2 under ZeRO 2 and 3, beside FSDP2 and beside DeepSpeed without rlcore",
        _prepare,
        estimate_s=40.0,
        device_estimate_s=90.0,
    ),
)
