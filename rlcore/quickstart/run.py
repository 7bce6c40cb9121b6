"""The whole GRPO algorithm of ``rlcore quickstart``, to be read as a first lesson.

A step samples eight answers to each of 96 problems and gives each a reward by the verifier. Of the problems that some
answers got right and some wrong it takes 32, and makes the better answers to each likelier (arXiv:2402.03300; dynamic
sampling and asymmetric clipping from arXiv:2503.14476). Trainer and sampler share one
device and use it alternately, as on a GPU that cannot hold both. Begin at ``Quickstart.run``; methods of ``self.train``
that are not the engine's own are in ``policy.py``.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import torch
from torch import Tensor

import rlcore
from rlcore.device import Device
from rlcore.ops import group_advantage, ppo_clip
from rlcore.quickstart import task
from rlcore.quickstart.config import RECORD, QuickstartConfig
from rlcore.quickstart.display import Display, print_table, summary
from rlcore.quickstart.host_threads import host_threads
from rlcore.quickstart.interrupt import Interrupt, Interrupted
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.output import Phases, RunFolder
from rlcore.quickstart.policy import policy_class
from rlcore.quickstart.pretrained import tokenizer_of

ASKED, PROMPTS, SAMPLES, TEMPERATURE, MINIBATCHES, RATE = 96, 32, 8, 1.25, 4, 3e-4
IMITATION_BATCH, IMITATION_RATE, WARM_UP, GATE_ACCURACY, MAX_IMITATION_STEPS = 256, 2e-3, 20, 0.47, 600
USUAL_IMITATION_STEPS = (150, 450)  # of the quickstart's own model
EVERY = 10  # steps between evaluations, and between checkpoints
SMALL: dict[str, dict[str, Any]] = {
    "vllm": {"enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 26},
    "sglang": {"disable_cuda_graph": True, "max_total_tokens": 1 << 14},
}
"""By executor, for a small model: nothing is compiled at the start, and each step moves a small KV cache."""


def sampler_dtype(executor: str, device: Device) -> str:
    """Return the trainer's float32, or bfloat16 of SGLang on a GPU, which has no float32 there."""
    return "bfloat16" if executor == "sglang" and not device.spec.is_host else "float32"


class Quickstart:
    """One run: imitation until half of the sampled answers are right, then GRPO."""

    def __init__(self, config: QuickstartConfig, folder: RunFolder, display: Display, interrupt: Interrupt) -> None:
        self.config, self.folder, self.display, self.interrupt = config, folder, display, interrupt
        path = config.model or quickstart_model(seed=config.seed)
        self.tokenizer = tokenizer_of(path)
        self.max_tokens = task.max_answer_tokens(self.tokenizer)
        self.training, self.gate, self.held_out = (
            task.problems(split, seed=config.seed) for split in ("train", "gate", "held-out")
        )
        self.done = {"imitation": 0, "step": -1}  # steps of each kind; step -1: still imitating
        with rlcore.meta_device():
            self.train = rlcore.TrainEngine(policy_class(path).from_pretrained(path))
        self.infer = rlcore.InferenceEngine(path, executor=config.executor)

    def run(self) -> None:
        """Run all steps. Raises Interrupted between two steps, with everything saved."""
        with self.train, self.infer:
            self.display.doing("loading the model and starting the trainer")
            self.train.build(devices=self.config.device, launcher=self.config.launcher)
            self.build_sampler()
            self.interrupt.begin_steps()
            if self.config.resume:
                self.resume()
            else:
                self.folder.begin()
            if self.done["step"] < 0:
                self.imitate()
            self.train.offload()
            while self.done["step"] < self.config.steps:
                self.done["step"] += 1
                self.record(self.grpo_step(self.done["step"]))
                self.save_when_due()
            self.train.onload("weights")
            self.train.export(self.folder.model)

    def build_sampler(self) -> None:
        """Build the sampler in the trainer's dtype where it has that, so that both compute the same log-probs."""
        self.display.doing("starting the sampler")
        if self.config.executor != "hf":
            self.display.note(f"starting the sampler, {self.config.executor}: 10 s to two minutes")
        options = SMALL.get(self.config.executor, {}) if self.config.model is None else {}
        dtype = sampler_dtype(self.config.executor, rlcore.get_device(self.config.device))
        self.infer.build(colocate_with=self.train, launcher=self.config.launcher, dtype=dtype, **options)

    def imitate(self) -> None:
        """Supervised warm-start: imitate the forgetful teacher until sampled answers are nearly half right."""
        accuracy = 0.0
        for step in range(self.done["imitation"], MAX_IMITATION_STEPS):
            if step % EVERY == 0:
                accuracy = self.sampled_accuracy(self.gate)
            self.display.imitating(step, accuracy, wanted=GATE_ACCURACY, usual=USUAL_IMITATION_STEPS)
            if accuracy >= GATE_ACCURACY:
                break
            self.train.set_rate(IMITATION_RATE * min(1, (step + 1) / WARM_UP))
            generator = self.generator("imitation", step)
            self.train.imitate(**task.imitation_batch(self.training, IMITATION_BATCH, self.tokenizer, generator))
            self.done["imitation"] += 1
            self.save_when_due()
        self.train.begin_reinforcement()
        self.train.sync_weights(self.infer)
        self.done["step"] = 0
        self.record({"step": 0, "imitation_steps": self.done["imitation"], "accuracy": self.accuracy(self.held_out)})
        self.save_when_due()

    def grpo_step(self, step: int) -> dict[str, float]:
        """Sample, compute rewards, train, and sync the new weights; return the metrics."""
        phases, generator = Phases(), self.generator("grpo", step)
        asked = task.draw(self.training, ASKED, generator)
        with phases("generate"):
            outputs = self.sample(asked, n=SAMPLES, temperature=TEMPERATURE, generator=generator)
        rewards = self.judge(asked, outputs)
        num_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        taught = instructive(rewards)
        judged, outputs = rewards[taught], [outputs[row] for row in taught]
        if self.config.shuffle_rewards:  # the control: within each group, so that nothing can be learned
            judged = torch.stack([row[torch.randperm(SAMPLES, generator=generator)] for row in judged])
        batch = rlcore.collate(outputs, advantages=group_advantage(judged))
        with phases("offload"):
            self.infer.meta()
            self.train.onload()
        with phases("train"):
            metrics = self.learn(batch, step, generator)
        self.hand_over(phases)
        metrics |= {"step": step, "reward": float(rewards.mean())} | phases.seconds
        metrics["tokens_per_s"] = num_tokens / phases.seconds["generate_s"]
        if step % EVERY == 0 or step == self.config.steps:
            metrics["accuracy"] = self.accuracy(self.held_out)
        return metrics

    def judge(self, asked: list[task.Problem], outputs: list[Any]) -> Tensor:
        """Return the verifier's reward of each answer, [problems, samples] float32."""
        return torch.tensor(
            [
                [task.reward(problem, answer.text) for answer in output.outputs]
                for problem, output in zip(asked, outputs, strict=True)
            ]
        )

    def learn(self, batch: dict[str, Tensor], step: int, generator: torch.Generator) -> dict[str, float]:
        """Do one optimizer step for each minibatch. Parity is the largest gap of the two engines' log-probs."""
        self.train.set_rate(RATE * (1 - (step - 1) / self.config.steps))
        parity = (self.train.forward_logprobs(batch, temperature=TEMPERATURE) - batch["old_logprobs"]).abs().max()
        metrics: dict[str, float] = {}
        for rows in torch.randperm(len(batch["input_ids"]), generator=generator).chunk(MINIBATCHES):
            minibatch = {name: values[rows] for name, values in batch.items()}
            loss_fn = ppo_clip(clip_low=0.2, clip_high=0.28)
            metrics = self.train.train_batch(minibatch, loss_fn, temperature=TEMPERATURE)
        return metrics | {"parity": float(parity)}

    def hand_over(self, phases: Phases) -> None:
        """Give the device and the new weights to the sampler."""
        with phases("offload"):
            self.train.offload("optimizer", "grads")
            self.infer.onload("weights")
        with phases("sync"):
            self.train.sync_weights(self.infer)
        with phases("offload"):
            self.train.offload()
            self.infer.onload("kv_cache")

    def sample(self, asked: list[task.Problem], *, generator: torch.Generator, **params: Any) -> list[Any]:
        """Sample completions for each problem; each prompt has its own seed."""
        seeds = torch.randint(2**62, (len(asked),), generator=generator).tolist()
        each = [{"max_tokens": self.max_tokens, "seed": seed} | params for seed in seeds]
        return self.infer.generate([task.prompt_text(problem) for problem in asked], each, progress=False)

    def accuracy(self, asked: list[task.Problem]) -> float:
        """Return the share of right greedy answers."""
        outputs = self.sample(asked, temperature=0.0, generator=self.generator("accuracy", 0))
        return task.accuracy(asked, [output.outputs[0].text for output in outputs])

    def sampled_accuracy(self, asked: list[task.Problem]) -> float:
        """Return the share of sampled answers that are right, without the chance of samples: by their probability."""
        batch = task.answer_batch(asked, [task.answer_text(problem) for problem in asked], self.tokenizer)
        scored = {"loss_mask": batch.pop("labels") != task.IGNORED} | batch
        return float(self.train.forward_logprobs(scored).sum(1).exp().mean())

    def generator(self, purpose: str, index: int) -> torch.Generator:
        """Return a generator that depends only on seed, purpose and index, so that a resumed run draws the same."""
        seed = random.Random(f"{self.config.seed} {purpose} {index}").getrandbits(63)
        return torch.Generator().manual_seed(seed)

    def record(self, metrics: dict[str, float]) -> None:
        self.folder.append(metrics)
        self.display.update(metrics)

    def save_when_due(self) -> None:
        """Save every ``EVERY`` GRPO steps, at the end, and when the user wants to stop."""
        step = self.done["step"]
        is_due = step >= 0 and (step % EVERY == 0 or step == self.config.steps)
        if is_due or self.interrupt.is_requested:
            self.train.onload()
            self.train.save(self.folder.checkpoint, self.done)
            if step >= 0:  # else imitation goes on
                self.train.offload()
        if self.interrupt.is_requested:
            raise Interrupted

    def resume(self) -> None:
        """Continue from the checkpoint, or from the beginning if there is none yet."""
        note = "the run ended before its first checkpoint: starting from the beginning"
        if self.folder.has_checkpoint():
            self.done = self.train.load(self.folder.checkpoint)
            self.train.sync_weights(self.infer)
            note = f"resumed after {self.done['imitation']} imitation steps, {max(self.done['step'], 0)} steps"
        self.folder.go_on(self.done["step"])  # it writes: a resume that fails has changed nothing
        self.display.note(note)


def with_simulation(config: QuickstartConfig) -> QuickstartConfig:
    """Return ``config`` with the words for a simulated device; a run that had one keeps them on another device."""
    device = rlcore.get_device(config.device)
    simulation = device.simulation()
    if config.simulation or (simulation is None and device.evidence != "simulated"):
        return config
    by = f" by {simulation.name}" if simulation else ""
    return dataclasses.replace(config, simulation=f"{device.name} is simulated{by}")


def run(config: QuickstartConfig) -> int:
    """Do the whole run; return the exit code of ``rlcore quickstart``."""
    config = with_simulation(config)
    threads = config.threads or (1 if config.model is None else torch.get_num_threads())
    with host_threads(threads), RunFolder(config) as folder:
        try:
            with Display(steps=config.steps) as display, Interrupt(display.stopping) as interrupt:
                if config.simulation:
                    display.note(f"{config.simulation}: nothing here is a measurement of hardware")
                Quickstart(config, folder, display, interrupt).run()
        except Interrupted:
            print(f"stopped; continue with: {config.resume_command()}", file=sys.stderr)
            return 130
        except KeyboardInterrupt:
            if (folder.checkpoint / "manifest.json").exists():
                print(f"stopped at once; continue from the last checkpoint: {config.resume_command()}", file=sys.stderr)
            elif (folder.path / RECORD).exists():
                print("stopped at once, before the first checkpoint: nothing is kept", file=sys.stderr)
            raise
        folder.draw()
        simulated = {"simulated": config.simulation} if config.simulation else {}
        print_table("rlcore quickstart", simulated | summary(folder))
    return 0


def instructive(rewards: Tensor) -> list[int]:
    """Return up to ``PROMPTS`` problems with right and wrong answers: the others have no advantage, and so no gradient.

    Args:
        rewards: [problems, samples] float32.

    Returns:
        Rows of ``rewards``; the first ones where no problem has both.
    """
    mixed = [row for row, answers in enumerate(rewards.tolist()) if len(set(answers)) > 1]
    return (mixed or list(range(len(rewards))))[:PROMPTS]
