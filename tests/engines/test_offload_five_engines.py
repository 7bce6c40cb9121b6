"""Five engines of a PPO step on one device, each there only while it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.offload import host_arena as arena_module
from rlcore.engines.offload.host_arena import arena_of
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

CYCLES = 12
VOCAB = 21


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(arena_module, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(arena_module, "_arenas", {})
    return arena_of(rlcore.get_device("cpu"))


def modules(folder: Path) -> dict[str, Any]:
    from transformers import Qwen2ForCausalLM

    class Frozen(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def score(self, tokens: Tensor) -> Tensor:
            """[N], of whole sequences."""
            with torch.no_grad():
                return self(tokens).logits.mean((1, 2))

    class Actor(Frozen):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Critic(Actor):
        def fit(self, tokens: Tensor, returns: Tensor) -> Tensor:
            """The values before the step."""
            values: Tensor = self(tokens).logits.mean((1, 2))
            (values - returns).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return values.detach()

    classes = {"actor": Actor, "critic": Critic, "reference": Frozen, "reward": Frozen}
    with rlcore.meta_device():
        return {name: kind.from_pretrained(folder) for name, kind in classes.items()}


class Five:
    """With ``in_turns`` an engine leaves as the next one comes."""

    def __init__(self, folder: Path, *, in_turns: bool) -> None:
        self._stack = ExitStack()
        self._in_turns = in_turns
        self.engines: dict[str, Any] = {name: rlcore.TrainEngine(module) for name, module in modules(folder).items()}
        self.engines["rollout"] = rlcore.InferenceEngine(folder)
        for name, engine in self.engines.items():
            self._stack.enter_context(engine).build(devices="cpu", onload=not in_turns or name == "rollout")
        self._here = ["rollout"]

    def __enter__(self) -> Five:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self, name: str) -> Any:
        """The engine, loaded, and no other."""
        if self._in_turns:
            leaving = [(self.engines[other], ()) for other in self._here if other != name]
            rlcore.swap(out=leaving, in_=[(self.engines[name], ())])
            self._here = [name]
            for other, engine in self.engines.items():
                states = set(engine.state.values()) - {"released"}  # a cache that left
                assert states == ({"loaded"} if other == name else {"offloaded"}), other
        return self.engines[name]

    def give_weights(self) -> None:
        """Those of the actor to the rollout, which are both there for that."""
        actor, rollout = self.engines["actor"], self.engines["rollout"]
        if self._in_turns:
            rlcore.swap(out=[(actor, ("optimizer", "grads"))], in_=[(rollout, "weights")])
            self._here = ["actor", "rollout"]
        actor.sync_weights(rollout)

    def step(self, number: int) -> tuple[list[int], list[float]]:
        """What came out of all five."""
        prompts = [f"{number}+{digit}=" for digit in range(4)]
        outputs = self.turn("rollout").generate(prompts, {"temperature": 1.0, "seed": number, "max_tokens": 6})
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        ids = torch.tensor([[*(one + [0] * 6)[:6]] for one in tokens])
        batch = {"input_ids": ids}
        ref_logprobs = self.turn("reference").forward_logprobs(batch)
        rewards = self.turn("reward").call("score", ids, gather="first")
        values = self.turn("critic").call("fit", ids, rewards, gather="first")
        actor = self.turn("actor")
        old_logprobs = actor.forward_logprobs(batch)
        metrics = actor.train_batch(
            batch | {"old_logprobs": old_logprobs, "advantages": rewards - values + ref_logprobs.sum(1)}, ppo_clip()
        )
        self.give_weights()
        numbers = [metrics["loss"], metrics["grad_norm"], *values.tolist(), float(ref_logprobs.sum())]
        return [token for one in tokens for token in one], numbers

    def host_bytes(self) -> int:
        reports = [report for engine in self.engines.values() for report in engine.memory_report()]
        return sum(tag["host_bytes"] for report in reports for tag in report["tags"].values())


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@pytest.fixture
def expected(qwen2_folder: Path) -> Iterator[list[Any]]:
    with Five(qwen2_folder, in_turns=False) as five:
        yield [five.step(number) for number in range(CYCLES)]


@pytest.mark.slow
def test_five_engines_in_turns_do_what_they_do_together(qwen2_folder: Path, arena: Any, expected: list[Any]) -> None:
    arena_bytes, held, anonymous = [], [], []
    with Five(qwen2_folder, in_turns=True) as five:
        for number in range(CYCLES):
            assert five.step(number) == expected[number], f"step {number}, bit by bit"
            arena_bytes.append(arena.total_bytes)
            held.append(five.host_bytes())
            anonymous.append(anonymous_bytes())
    assert len(set(arena_bytes[2:])) == 1, "the host memory of the first cycles does for the later ones"
    assert max(held[2:]) - min(held[2:]) <= 16 * 4096, "to a block for each tag"
    # What leaks grows in both halves; what else this process does may come once.
    assert min(anonymous[-1] - anonymous[7], anonymous[7] - anonymous[3]) < 8 << 20, anonymous
    assert arena.total_bytes == 0, "closed engines give it back"
