"""LightRFT's GRPO program for a maths task (examples/gsm8k_geo3k) on rlcore: its imports are changed.

usage: torchrun --nproc-per-node 2 lightrft_grpo.py --pretrain FOLDER --fsdp --engine_type hf [LightRFT's other flags]

The flow is LightRFT's: experiences, group norm of rewards, a replay buffer, micro-batches, ``update_engine_weights``.
The data are the quickstart's additions instead of GSM8K, which is not here, and the reward is a rule, as there.
"""

import argparse
import math
import sys
from typing import Any

import torch

from rlcore.compat.lightrft import ActorLanguage, PolicyLoss, compute_approx_kl, get_strategy, masked_mean
from rlcore.quickstart import task
from rlcore.quickstart.pretrained import tokenizer_of


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (("pretrain", ""), ("engine_type", "vllm"), ("kl_estimator", "k3"), ("ckpt_path", "")):
        parser.add_argument(f"--{name}", default=default)
    for flag in ("fsdp", "bf16", "use_kl_loss", "enable_engine_sleep", "adam_offload"):
        parser.add_argument(f"--{flag}", action="store_true")
    numbers = {"train_batch_size": 128, "micro_train_batch_size": 16, "rollout_batch_size": 16, "seed": 42}
    numbers |= {"n_samples_per_prompt": 8, "num_episodes": 1, "max_steps": 20, "zero_stage": 2, "engine_tp_size": 1}
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    rates = {"actor_learning_rate": 1e-6, "l2": 0.01, "init_kl_coef": 0.01, "lr_warmup_ratio": 0.03, "max_norm": 1.0}
    for name, rate in (rates | {"temperature": 1.0, "eps_clip": 0.2, "engine_mem_util": 0.6}).items():
        parser.add_argument(f"--{name}", type=float, default=rate)
    return parser.parse_args(argv)


def reward_fn(answer: str, reference: str) -> float:
    """Share of the answer's digits that are right."""
    return sum(said == right for said, right in zip(answer, reference, strict=False)) / len(reference)


def make_experience(
    strategy: Any, actor: Any, initial_model: Any, problems: list[task.Problem], tokenizer: Any
) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Return a sample for each completion of this rank's prompts, and their mean reward."""
    args, n = strategy.args, strategy.args.n_samples_per_prompt
    prompts = [task.prompt_tokens(problem, tokenizer) for problem in problems for _ in range(n)]
    sampling_params = {"temperature": args.temperature, "max_new_tokens": task.max_answer_tokens(tokenizer)}
    outputs = strategy.gather_and_generate(sampling_params, prompts, sleep_engine=args.enable_engine_sleep)
    longest_prompt, longest = max(map(len, prompts)), max(len(one.output_token_ids) for one in outputs)
    sequences = torch.full((len(outputs), longest_prompt + longest), tokenizer.pad_token_id)
    mask = torch.zeros_like(sequences)
    for row, one in enumerate(outputs):
        start, end = longest_prompt - len(one.prompt_token_ids), longest_prompt + len(one.output_token_ids)
        sequences[row, start:end] = torch.tensor(one.prompt_token_ids + one.output_token_ids)
        mask[row, start:end] = 1
    texts = [tokenizer.decode(one.output_token_ids, skip_special_tokens=True) for one in outputs]
    references = [task.answer_text(problem) for problem in problems for _ in range(n)]
    rewards = torch.tensor([reward_fn(*pair) for pair in zip(texts, references, strict=True)]).view(-1, n)
    group_norm = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)
    actor.eval()
    with torch.no_grad():
        old = actor(sequences, longest, attention_mask=mask)
        strategy.reload_model(initial_model)
        base = torch.zeros_like(old) if initial_model is None else initial_model(sequences, longest, mask)
        strategy.offload_model(initial_model)
    columns = {"sequences": sequences, "attention_mask": mask, "action_log_probs": old, "base_action_log_probs": base}
    columns |= {"action_mask": mask[:, -longest:], "advantages": group_norm.view(-1, 1).expand(-1, longest)}
    return [{name: one[row] for name, one in columns.items()} for row in range(len(outputs))], float(rewards.mean())


def training_step(
    strategy: Any, actor: Any, optimizer: Any, scheduler: Any, samples: dict[str, torch.Tensor]
) -> dict[str, float]:
    args = strategy.args
    actor.train()
    mask = samples["action_mask"]
    action_log_probs = actor(samples["sequences"], mask.size(1), attention_mask=samples["attention_mask"])
    mask = mask.to(action_log_probs.device)
    old, base, advantages = (
        samples[name].to(mask.device) for name in ("action_log_probs", "base_action_log_probs", "advantages")
    )
    loss = policy_loss = PolicyLoss(args.eps_clip)(action_log_probs, old, advantages, mask)
    kl = compute_approx_kl(action_log_probs, base, mask, args.kl_estimator)
    if args.use_kl_loss:
        loss = policy_loss + args.init_kl_coef * masked_mean(kl, mask, dim=-1).mean()
    strategy.backward(loss, actor, optimizer)
    strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
    return {"policy_loss": policy_loss.item(), "kl": masked_mean(kl, mask).item()}


def main(argv: list[str]) -> list[float]:
    args = arguments(argv)
    strategy = get_strategy(args)
    tokenizer = tokenizer_of(args.pretrain)
    with strategy.init_model_context():
        actor = ActorLanguage(args.pretrain, bf16=args.bf16)
        initial_model = ActorLanguage(args.pretrain, bf16=args.bf16) if args.init_kl_coef and args.use_kl_loss else None
    steps_each = args.rollout_batch_size * args.n_samples_per_prompt // args.train_batch_size
    triple, _, _, initial_model = strategy.prepare_models_and_optimizers(
        actor, None, None, initial_model, args, math.ceil(args.max_steps * steps_each)
    )
    actor, optimizer, scheduler = triple
    strategy.offload_model(initial_model)
    strategy.setup_inference_engine(args, engine_type=args.engine_type, actor=actor)
    prompts: Any = task.problems("train", seed=args.seed)
    prompts_dataloader = strategy.setup_dataloader(
        prompts, args.rollout_batch_size // strategy.world_size, collate_fn=list
    )
    rewards: list[float] = []
    for _episode in range(args.num_episodes):
        for problems in prompts_dataloader:
            strategy.maybe_offload_optimizer(optimizer)
            buffer: Any
            buffer, reward = make_experience(strategy, actor, initial_model, problems, tokenizer)
            strategy.maybe_load_optimizer(optimizer)
            loader = torch.utils.data.DataLoader(buffer, args.micro_train_batch_size, shuffle=True, drop_last=True)
            status = [training_step(strategy, actor, optimizer, scheduler, samples) for samples in loader]
            strategy.update_engine_weights(actor)
            found = strategy.all_reduce({"reward": reward} | status[-1])
            rewards.append(found["reward"])
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            strategy.print(f"step {len(rewards)}  {numbers}  lr {scheduler.get_last_lr()[0]:.2e}")
            if len(rewards) == args.max_steps:
                break
    if args.ckpt_path:
        strategy.save_ckpt(actor.model, args.ckpt_path, f"step{len(rewards)}", client_state={"steps": len(rewards)})
    strategy.close()
    return rewards


if __name__ == "__main__":
    main(sys.argv[1:])
