"""One program for one device, for all of a host, and for several hosts: only its arguments differ.

The reward is the share of sevens in an answer.

python more_devices.py                                         one device
python more_devices.py --devices 8                             eight of this host
python more_devices.py --devices 16 --address auto             16 of a Ray cluster, started on one of its hosts
torchrun ... more_devices.py --devices 16 --launcher torchrun  16 without Ray, started on all hosts; or srun

The trainer is sharded over all devices, and each has a sampler.
"""

import argparse

import torch
from transformers import Qwen2ForCausalLM

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.quickstart.host_threads import host_threads
from rlcore.quickstart.model import quickstart_model


class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)


def policy_gradient(logprob, entropy, per_token):
    ratio = (logprob - per_token["old_logprobs"]).exp()
    return -ratio * per_token["advantages"], {}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=1, help="how many")
parser.add_argument("--launcher", help="how workers start, such as torchrun")
parser.add_argument("--address", help="the Ray cluster: auto, or such as 10.0.0.1:6379")
parser.add_argument("--hosts", type=int, help="of the Ray cluster, as many devices of each; else as few as will do")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

rlcore.init(launcher=options.launcher, address=options.address)
path = quickstart_model(seed=0)  # or the folder of any Qwen2, which all hosts have
with rlcore.meta_device():
    module = Policy.from_pretrained(path)
# The model is small: more threads of the host would wait for each other.
with host_threads(1), rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(path) as infer:
    train.build(data_parallel_size=options.devices, num_hosts=options.hosts)
    infer.build(colocate_with=train)
    print(f"trainer and samplers on {', '.join(train.devices)}")
    for step in range(options.steps):
        outputs = infer.generate(["12+34=", "56+78="], {"n": 32, "max_tokens": 4, "seed": step}, progress=False)
        rewards = torch.tensor([[answer.text.count("7") / 4 for answer in output.outputs] for output in outputs])
        batch = rlcore.collate(outputs, advantages=rewards - rewards.mean())
        metrics = train.train_batch(batch, policy_gradient)
        route = train.sync_weights(infer).route
        print(f"step {step:2}  reward {rewards.mean():.3f}  gradient {metrics['grad_norm']:.6f}  weights by {route}")
