"""A loss of your own on a Hugging Face model; trainer and sampler take turns on one device. Reward: sevens."""

import torch
from transformers import Qwen2ForCausalLM

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.quickstart.host_threads import host_threads
from rlcore.quickstart.model import quickstart_model


class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)


def policy_gradient(logprob, entropy, per_token):  # vectors, one entry a token; any PyTorch
    ratio = (logprob - per_token["old_logprobs"]).exp()
    return -ratio * per_token["advantages"], {"ratio_max": ratio}


path = quickstart_model(seed=0)  # or the folder of any Qwen2
with rlcore.meta_device():
    module = Policy.from_pretrained(path)  # reads only the config
# The model is small: more threads of the host would wait for each other.
with host_threads(1), rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(path) as infer:
    train.build(onload=False)
    infer.build(colocate_with=train)
    for step in range(10):
        outputs = infer.generate(["12+34=", "56+78="], {"n": 32, "max_tokens": 4, "seed": step})
        rewards = torch.tensor([[answer.text.count("7") / 4 for answer in output.outputs] for output in outputs])
        batch = rlcore.collate(outputs, advantages=rewards - rewards.mean())
        infer.meta()
        train.onload()
        metrics = train.train_batch(batch, policy_gradient)
        train.offload("optimizer", "grads")
        infer.onload("weights")
        train.sync_weights(infer)
        train.offload()
        infer.onload("kv_cache")
        ratio = metrics["ratio_max"]  # 1: sampler and trainer give each token the same probability
        print(f"step {step:2}  reward {rewards.mean():.3f}  ratio {ratio:.5f}")
