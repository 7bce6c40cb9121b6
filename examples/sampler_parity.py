"""How far a sampler's log-probs are from the trainer's, token by token: sampler_parity.py [FOLDER [EXECUTOR [DTYPE]]].

Ratios of policy gradients assume that it is nothing. FOLDER is a Hugging Face model; without one, a small random model.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig

import rlcore
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import policy_class

FOLDER, EXECUTOR, DTYPE, *_ = (*sys.argv[1:], *("", "hf", "bfloat16")[len(sys.argv) - 1 :])
path = Path(FOLDER) if FOLDER else quickstart_model(seed=0)
vocab_size = AutoConfig.from_pretrained(path).vocab_size
prompts = torch.randint(vocab_size, (64, 16), generator=torch.Generator().manual_seed(0)).tolist()

if __name__ == "__main__":
    if not FOLDER:
        torch.set_num_threads(1)  # the model is small: more threads of the host would wait for each other
    with rlcore.meta_device():
        module = policy_class(path).from_pretrained(path)
    with rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(path, executor=EXECUTOR) as infer:
        train.build(dtype=DTYPE)
        infer.build(colocate_with=train, dtype=DTYPE)
        print(f"{path.name}, {DTYPE}, {EXECUTOR} against {type(module).__name__} on {train.device}")
        print("temperature   tokens   mean       p99        max        mean of ratio")
        for temperature in (0.5, 1.0, 2.0):
            params = {"n": 4, "max_tokens": 64, "temperature": temperature, "seed": 1, "ignore_eos": True}
            batch = rlcore.collate(infer.generate(prompts, params))
            kept = batch["loss_mask"].bool()
            ours = train.forward_logprobs(batch, temperature=temperature)[kept].double()
            apart = ours - batch["old_logprobs"][kept].double()
            figures = apart.abs().mean(), apart.abs().quantile(0.99), apart.abs().max()
            shown = "   ".join(f"{figure:.2e}" for figure in figures)
            print(f"{temperature:11}   {len(apart):6,}   {shown}   {apart.exp().mean():.6f}")
