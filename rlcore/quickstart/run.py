"""GRPO on rlcore, whole: the algorithm of ``rlcore quickstart``, to be read as a first lesson.

A step samples eight answers to each of 32 problems, lets the verifier judge them, and makes the better answers of
each group likelier (arXiv:2402.03300; asymmetric clipping from arXiv:2503.14476). Trainer and sampler share one
device and take turns on it, as they would on a GPU that cannot hold both.
"""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlcore
from rlcore.engines.pretrained import check_model_folder, load_tokenizer
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import group_advantage, ppo_clip
from rlcore.quickstart import task
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.display import Display, print_table
from rlcore.quickstart.interrupt import Interrupt, Interrupted
from rlcore.quickstart.model import load_transformers, quickstart_model
from rlcore.quickstart.output import PHASES, RunFolder
from rlcore.quickstart.phases import Phases

PROMPTS, SAMPLES, MINIBATCHES, LEARNING_RATE = 32, 8, 4, 2e-4
IMITATION_BATCH, IMITATION_RATE, GATE_ACCURACY, MAX_IMITATION_STEPS = 256, 2e-3, 0.44, 600
EVERY = 10  # steps between evaluations, and between checkpoints


class Policy(HuggingFaceTrainModule):
    """The methods that run where the weights are; ``policy_class`` mixes them into the model's own class."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=IMITATION_RATE)

    def imitate(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> float:
        """One supervised step."""
        device: Any = self.device
        logits = self(input_ids.to(device), attention_mask.to(device)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten().to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def begin_reinforcement(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    def decay(self, done: float) -> None:
        """Lower the learning rate linearly; ``done`` is the share of the run in [0, 1]."""
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - done)


def policy_class(path: Path) -> Any:
    """``class QuickstartPolicy(Policy, <the model's class>)``, for any Hugging Face causal language model."""
    transformers = load_transformers()
    transformers.utils.logging.disable_progress_bar()  # it would write over the display
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    return type("QuickstartPolicy", (Policy, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]), {})


class Quickstart:
    """One run: imitation until the model is half right, then GRPO."""

    def __init__(self, config: QuickstartConfig, folder: RunFolder, display: Display, interrupt: Interrupt) -> None:
        self.config, self.folder, self.display, self.interrupt = config, folder, display, interrupt
        path = config.model or quickstart_model(seed=config.seed)
        self.tokenizer = load_tokenizer(check_model_folder(path))
        self.max_tokens = task.max_answer_tokens(self.tokenizer)
        self.training, self.gate, self.held_out = (
            task.problems(split, seed=config.seed) for split in ("train", "gate", "held-out")
        )
        self.done = {"imitation": 0, "step": -1}  # -1: still imitating
        with rlcore.meta_device():
            self.train = rlcore.TrainEngine(policy_class(path).from_pretrained(path))
        self.infer = rlcore.InferenceEngine(path)

    def run(self) -> None:
        """Raises Interrupted between steps, with everything saved."""
        with self.train, self.infer:
            self.train.build(devices=self.config.device)
            self.infer.build(colocate_with=self.train)
            if self.config.resume:
                self.done = self.train.load(self.folder.checkpoint)
                self.folder.rewind(self.done["step"])
                self.train.sync_weights(self.infer)
            if self.done["step"] < 0:
                self.imitate()
            self.train.offload()
            while self.done["step"] < self.config.steps:
                self.done["step"] += 1
                self.record(self.grpo_step(self.done["step"]))
                self.save_when_due(self.done["step"])
            self.train.onload("weights")
            self.train.export(self.folder.model)

    def imitate(self) -> None:
        """Supervised warm-start: imitate the forgetful teacher until sampled answers are nearly half right."""
        for step in range(self.done["imitation"], MAX_IMITATION_STEPS):
            if step % EVERY == 0:
                self.train.sync_weights(self.infer)
                if self.accuracy(self.gate, temperature=1.0) >= GATE_ACCURACY:
                    break
            generator = self.generator("imitation", step)
            self.train.imitate(**task.imitation_batch(self.training, IMITATION_BATCH, self.tokenizer, generator))
            self.done["imitation"] += 1
            self.save_when_due(None)
        self.train.begin_reinforcement()
        self.done["step"] = 0
        self.record({"step": 0, "imitation_steps": self.done["imitation"], "accuracy": self.accuracy(self.held_out)})
        self.save_when_due(0)

    def grpo_step(self, step: int) -> dict[str, float]:
        """Sample, judge, learn, hand over the new weights."""
        train, infer, phases, generator = self.train, self.infer, Phases(), self.generator("grpo", step)
        asked = task.draw(self.training, PROMPTS, generator)
        with phases("generate"):
            outputs = self.sample(asked, n=SAMPLES, generator=generator)
        rewards = torch.tensor(
            [[task.reward(problem, answer.text) for answer in output.outputs]
             for problem, output in zip(asked, outputs, strict=True)]
        )  # fmt: skip
        judged = rewards
        if self.config.shuffle_rewards:  # the control: within each group, so that nothing can be learned
            judged = torch.stack([row[torch.randperm(SAMPLES, generator=generator)] for row in rewards])
        batch = rlcore.collate(outputs, advantages=group_advantage(judged))
        with phases("offload"):
            infer.meta()
            train.onload()
        with phases("train"):
            train.decay((step - 1) / self.config.steps)
            parity = (train.forward_logprobs(batch) - batch["old_logprobs"]).abs().max()
            for rows in torch.randperm(rewards.numel(), generator=generator).chunk(MINIBATCHES):
                minibatch = {name: values[rows] for name, values in batch.items()}
                metrics: dict[str, float] = train.train_batch(minibatch, ppo_clip(clip_low=0.2, clip_high=0.28))
        with phases("offload"):
            train.offload("optimizer", "grads")
            infer.onload("weights")
        with phases("sync"):
            train.sync_weights(infer)
        with phases("offload"):
            train.offload()
            infer.onload("kv_cache")

        metrics |= {"step": step, "reward": float(rewards.mean()), "parity": float(parity)} | phases.seconds
        metrics["tokens_per_s"] = int(batch["loss_mask"].sum()) / phases.seconds["generate_s"]
        if step % EVERY == 0 or step == self.config.steps:
            metrics["accuracy"] = self.accuracy(self.held_out)
        return metrics

    def sample(self, asked: list[task.Problem], *, generator: torch.Generator, **params: Any) -> list[Any]:
        """Completions for each problem, each prompt with a seed of its own."""
        seeds = torch.randint(2**62, (len(asked),), generator=generator).tolist()
        each = [{"max_tokens": self.max_tokens, "seed": seed} | params for seed in seeds]
        return self.infer.generate([task.prompt_text(problem) for problem in asked], each, progress=False)

    def accuracy(self, asked: list[task.Problem], *, temperature: float = 0.0) -> float:
        """Share of right answers, greedy unless a temperature is given."""
        outputs = self.sample(asked, temperature=temperature, generator=self.generator("accuracy", 0))
        return task.accuracy(asked, [output.outputs[0].text for output in outputs])

    def generator(self, purpose: str, index: int) -> torch.Generator:
        """Depends on nothing but the seed and what it is for, so that a resumed run draws the same."""
        seed = random.Random(f"{self.config.seed} {purpose} {index}").getrandbits(63)
        return torch.Generator().manual_seed(seed)

    def record(self, metrics: dict[str, float]) -> None:
        self.folder.append(metrics)
        self.display.update(metrics)

    def save_when_due(self, step: int | None) -> None:
        """Checkpoint every so many GRPO steps, at the end, and when the user wants to stop."""
        is_due = step is not None and (step % EVERY == 0 or step == self.config.steps)
        if is_due or self.interrupt.is_requested:
            self.train.onload()
            self.train.save(self.folder.checkpoint, self.done)
            if step is not None:
                self.train.offload()
        if self.interrupt.is_requested:
            raise Interrupted


def run(config: QuickstartConfig) -> int:
    """The whole run; returns the exit code of ``rlcore quickstart``."""
    with RunFolder(config) as folder, Display(steps=config.steps) as display, Interrupt(display.note) as interrupt:
        try:
            Quickstart(config, folder, display, interrupt).run()
        except Interrupted:
            display.note(
                f"stopped; continue with: rlcore quickstart --resume --output {shlex.quote(str(config.output))}"
            )
            return 130
    print_table("rlcore quickstart", summary(folder))
    return 0


def summary(folder: RunFolder) -> dict[str, str]:
    """What the run came to."""
    steps = folder.read()
    learning = [metrics for metrics in steps if "reward" in metrics]
    spent = {name: sum(metrics[f"{name}_s"] for metrics in learning) for name in PHASES}
    measured = [metrics["accuracy"] for metrics in steps if "accuracy" in metrics]
    return {
        "held-out accuracy, greedy": f"{measured[0]:.1%} before GRPO, {measured[-1]:.1%} after {len(learning)} steps",
        "sampler against trainer": f"log-probs differ by at most {max(m['parity'] for m in learning):.1e}",
        "seconds": ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items()),
        "picture": str(folder.draw()),
        "metrics": str(folder.metrics),
        "checkpoint": str(folder.checkpoint),
        "model": str(folder.model),
    }
