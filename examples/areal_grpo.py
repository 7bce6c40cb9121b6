"""AReaLite's GRPO program (examples/lite/gsm8k_grpo.py at tag v0.3.0-lite) on rlcore: its imports are changed.

usage: areal_grpo.py --config FILE.yaml [key.key=value ...]

Left out are what one process does not need (ranks, barriers), and its loggers; the data are the quickstart's additions
instead of GSM8K, which is not here. The loop is AReaLite's.
"""

import sys
from typing import Any

import torch

from rlcore.compat.areal import (
    FinetuneSpec,
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    WeightUpdateMeta,
    load_expr_config,
)
from rlcore.quickstart import task
from rlcore.quickstart.pretrained import tokenizer_of

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def get_dataset(split: Any, seed: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": task.prompt_text(one)}], "answer": task.answer_text(one)}
        for one in task.problems(split, seed=seed)
    ]


def reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **kwargs: Any) -> float:
    """Share of the answer's digits that are right."""
    return sum(said == right for said, right in zip(completions, answer, strict=False)) / len(answer)


def main_grpo(argv: list[str]) -> list[float]:
    config, _ = load_expr_config(argv, GRPOConfig)
    torch.manual_seed(config.seed)
    tokenizer = tokenizer_of(config.tokenizer_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    dataset: Any = get_dataset("train", config.seed)
    train_dataloader: Any = torch.utils.data.DataLoader(
        dataset,
        batch_size=config.train_dataset.batch_size,
        shuffle=config.train_dataset.shuffle,
        collate_fn=lambda items: items,
        drop_last=config.train_dataset.drop_last,
    )
    ft_spec = FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=len(train_dataloader) * config.train_dataset.batch_size,
        train_batch_size=config.train_dataset.batch_size,
    )

    rollout = RemoteSGLangEngine(config.rollout)
    rollout.initialize(None, ft_spec)
    eval_rollout = RemoteSGLangEngine(config.rollout)
    eval_rollout.initialize(None, ft_spec)
    eval_rollout.set_version(int(1e12))
    actor = FSDPPPOActor(config=config.actor)
    actor.initialize(None, ft_spec)
    ref = None
    if config.actor.kl_ctl > 0 and config.ref is not None:
        ref = FSDPPPOActor(config=config.ref)
        ref.initialize(None, ft_spec)
    weight_update_meta = WeightUpdateMeta.from_disk(config)
    workflow = RLVRWorkflow(
        reward_fn=reward_fn, gconfig=config.gconfig, tokenizer=tokenizer, enable_thinking=False, dump_dir=None
    )

    data_generator = iter(train_dataloader)
    rewards = []
    for global_step in range(config.total_train_steps or ft_spec.total_train_steps):
        if config.async_training:
            batch = rollout.prepare_batch(train_dataloader, workflow=workflow)
        else:
            batch = rollout.rollout_batch(next(data_generator), workflow=workflow)
        batch = batch.to(actor.device)
        if config.actor.recompute_logprob or config.actor.use_decoupled_loss:
            batch["prox_logp"] = actor.compute_logp(batch)
        if ref is not None:
            batch["ref_logp"] = ref.compute_logp(batch)
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        actor.step_lr_scheduler()

        rollout.pause()
        future = rollout.update_weights(weight_update_meta)
        actor.upload_weights(weight_update_meta)
        future.result()
        rollout.resume()
        actor.set_version(global_step + 1)
        rollout.set_version(global_step + 1)
        rewards.append(float(batch["rewards"].mean()))
        print(f"step {global_step}  reward {rewards[-1]:.3f}  loss {stats[-1]['loss']:.4f}")

    for item in get_dataset("gate", config.seed)[:8]:
        eval_rollout.submit(item, workflow)
    print(f"evaluation {float(eval_rollout.wait(8)['rewards'].mean()):.3f}")
    eval_rollout.destroy()
    rollout.destroy()
    if ref is not None:
        ref.destroy()
    actor.destroy()
    return rewards


if __name__ == "__main__":
    main_grpo(sys.argv[1:])
