"""The recipes of docs/integrations.md compute log-probabilities, entropies and gradients.

The frameworks are not here: modules of their names hold what a recipe replaces, and take the replacement.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.accuracy import assert_as_accurate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
B, L, H, V = 2, 9, 16, 23


def recipe(heading: str) -> str:
    section = PAGE.read_text("utf-8").partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return code


def run(heading: str, module: str, monkeypatch: pytest.MonkeyPatch, **holds: Any) -> Any:
    """Run a recipe; return the module of the framework in which it replaces something."""
    code = recipe(heading)
    assert len(code.splitlines()) <= 24, "two blank lines around each definition, and twenty of code"
    parts = module.split(".")
    for number in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: number + 1]), types.ModuleType(parts[number]))
        if number:
            setattr(sys.modules[".".join(parts[:number])], parts[number], sys.modules[".".join(parts[: number + 1])])
    found = sys.modules[module]
    vars(found).update(holds)
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), {})
    return found


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, L, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    return hidden, weight, torch.randint(0, V, (B, L), generator=generator)


def plain(logits: Tensor, tokens: Tensor, temperature: Any = 1.0) -> tuple[Tensor, Tensor]:
    every = (logits / temperature).log_softmax(-1)
    return every.gather(-1, tokens[..., None]).squeeze(-1), -(every.exp() * every).sum(-1)


def check(score: Any, reference: Any, *inputs: Tensor) -> None:
    """Compare what two functions return, and the gradients of its sum, with the reference in float64."""
    results = []
    for function, dtype in ((score, torch.float32), (reference, torch.float32), (reference, torch.float64)):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        outputs = [output for output in function(*leaves) if output is not None]
        sum(((number + 1) * output).sum() for number, output in enumerate(outputs)).backward()
        results.append([*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)])
    assert len(results[0]) == len(results[1])
    for found, own, exact in zip(*results, strict=True):
        assert_as_accurate(found, own, exact)


def test_openrlhf(monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, tokens = batch
    actor = run("OpenRLHF", "openrlhf.models.actor", monkeypatch)
    check(
        lambda logits: [actor.log_probs_from_logits(logits, tokens, temperature=0.7)],
        lambda logits: plain(logits, tokens, 0.7)[:1],
        hidden @ weight.T,
    )


def test_skyrl(monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, tokens = batch
    wrapper = run("SkyRL", "skyrl.backends.skyrl_train.workers.model_wrapper", monkeypatch)
    check(
        lambda logits: [wrapper.logprobs_from_logits(logits, tokens, inplace_backward=True)],
        lambda logits: plain(logits, tokens)[:1],
        hidden @ weight.T,
    )


def test_areal(monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor, Tensor], group: dist.ProcessGroup) -> None:
    hidden, weight, tokens = batch
    engine = run("AReaL", "areal.engine.fsdp_engine", monkeypatch)
    for tp_group in (None, group):
        check(
            lambda logits, tp_group=tp_group: engine.gather_logprobs_entropy(logits, tokens, 0.7, tp_group),
            lambda logits: plain(logits, tokens, 0.7),
            hidden @ weight.T,
        )


@pytest.mark.parametrize("is_masked", [False, True])
def test_slime(
    monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor, Tensor], group: dist.ProcessGroup, is_masked: bool
) -> None:
    hidden, weight, tokens = batch[0].flatten(0, 1), batch[1], batch[2].flatten()
    loss = run("slime", "slime.backends.megatron_utils.loss", monkeypatch)
    keep = torch.rand(B * L, V, generator=torch.Generator().manual_seed(1)) < 0.5
    keep = keep.scatter(-1, tokens[:, None], True) if is_masked else None

    def score(logits: Tensor) -> list[Tensor]:
        logprob, entropy = loss.calculate_log_probs_and_entropy(
            logits, tokens, group, with_entropy=True, log_prob_keep_mask=keep
        )
        assert logprob.shape == (B * L, 1)
        return [logprob.squeeze(-1), entropy]

    def reference(logits: Tensor) -> list[Tensor]:
        kept = logits if keep is None else logits.masked_fill(~keep, float("-inf"))
        return [kept.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1), plain(logits, tokens)[1]]

    check(score, reference, hidden @ weight.T)
    logits = (hidden @ weight.T).requires_grad_()
    assert not loss.calculate_log_probs_and_entropy(logits, tokens, group, with_entropy=True, with_entropy_grad=False)[
        1
    ].requires_grad
    assert loss.calculate_log_probs_and_entropy(logits, tokens, group)[1] is None
    nothing = loss.calculate_log_probs_and_entropy(logits[:0], tokens[:0], group, with_entropy=True)
    assert [tensor.shape for tensor in nothing] == [(0,), (0,)]


def test_prime_rl(monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    class FusedOutputLinear(nn.Linear):
        def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
            super().__init__(in_features, out_features, bias=False)

    hidden, weight, tokens = batch
    module = run(
        "prime-rl", "prime_rl.trainer.models.layers.lm_head", monkeypatch,
        FusedOutputLinear=FusedOutputLinear, PrimeLmOutput=dict,
    )  # fmt: skip
    head = module.FusedOutputLinear(H, V, chunk_size=4)
    assert type(head) is not FusedOutputLinear
    temperature = torch.linspace(0.5, 1.5, B * L).view(B, L)

    def score(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        del head.weight
        head.weight = weight
        output = head(hidden, labels=tokens, temperature=temperature)
        return [output["logprobs"], output["entropy"]]

    check(score, lambda hidden, weight: plain(hidden @ weight.T, tokens, temperature[..., None]), hidden, weight)


def test_nemo_rl(
    monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor, Tensor], group: dist.ProcessGroup
) -> None:
    hidden, weight, tokens = batch
    utils = run("NeMo-RL", "nemo_rl.distributed.model_utils", monkeypatch)

    def score(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        return [
            utils.from_parallel_hidden_states_to_logprobs(
                hidden.transpose(0, 1), weight, None, tokens, vocab_start_index=0, vocab_end_index=V, tp_group=group
            )
        ]

    check(score, lambda hidden, weight: plain((hidden @ weight.T)[:, :-1], tokens[:, 1:])[:1], hidden, weight)


def test_every_recipe_is_run() -> None:
    recipes = PAGE.read_text("utf-8").partition("\n## Recipes\n")[2]
    assert re.findall(r"^### (.*)$", recipes, re.MULTILINE) == [
        "OpenRLHF", "slime", "SkyRL", "prime-rl", "NeMo-RL", "AReaL",
    ]  # fmt: skip
