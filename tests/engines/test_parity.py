"""``rlcore parity``: samplers that are right, and planted ones that are not; its wrong calls, and its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import rlcore
from rlcore.activations import in_order, part_of, recording
from rlcore.cli import main as cli
from rlcore.engines.sampling.hf.executor import HfExecutor
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.parity.layers import compare, first_difference, largest_growth
from rlcore.parity.statistics import LogProbAgreement, by_position
from tests.accuracy import assert_within_rounding

from .test_routing_replay import EXPERTS


@pytest.fixture(scope="module")
def moe_folder(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> Path:
    from transformers import Qwen3MoeConfig

    return write_checkpoint(Qwen3MoeConfig(**tiny_config | {"num_hidden_layers": 3}, **EXPERTS))


def parity(folder: Path, *arguments: str) -> Any:
    sizes = ["--train", "cpu", "--dtype", "float32", "--sequences", "8", "--tokens", "8"]
    return CliRunner().invoke(cli.app, ["parity", str(folder), *sizes, *arguments])


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    result = parity(folder, "--json", *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_sampler_with_the_trainers_arithmetic_agrees(moe_folder: Path) -> None:
    found = report_of(moe_folder, "--threshold", "1e-3")
    assert found["agreement"]["tokens"] == 64
    assert found["without_replay"]["tokens"] == 64
    assert found["routes_apart"] == 0
    names = [part["name"] for part in found["layers"]]
    assert names[:4] == ["embedding", "layers.0.input_norm", "layers.0.attention", "layers.0.norm_behind_attention"]
    assert names[-3:] == ["layers.2.layer", "norm", "head"]
    assert [part["name"] for part in found["layers"] if part["kind"] == "router"] == [
        "layers.1.router",
        "layers.2.router",
    ]
    assert [(one["start"], one["stop"]) for one in found["positions"]] == [(at, at + 1) for at in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["layers.1.attention", "layers.2.router"])
def test_the_part_that_is_wrong_is_named(moe_folder: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    build = HfExecutor.build

    def build_wrong(self: HfExecutor, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        module = next(child for name, child in self.module.named_modules() if part_of(name) == part)
        with torch.no_grad():
            wrong = list(module.parameters())[-1]
            wrong.add_(torch.randn(wrong.shape, generator=torch.Generator().manual_seed(0)))

    monkeypatch.setattr(HfExecutor, "build", build_wrong)
    result = parity(moe_folder, "--threshold", "1e-3")
    assert result.exit_code == 1
    assert "above the threshold 0.001" in result.stderr
    assert f"first difference: {part} ({part.rpartition('.')[2]})" in result.stdout
    found = report_of(moe_folder)
    assert found["first"]["name"] == part
    assert found["agreement"]["mean"] > 1e-3
    assert found["routes_apart"] > 0, "routers see other inputs, or have other weights"


@pytest.mark.slow
def test_a_sampler_that_cannot_look_inside_is_compared_without_parts(
    qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(HfExecutor, "activations")
    result = parity(qwen2_folder)
    assert result.exit_code == 0
    assert "the parts of the model are not compared: activations() of HfExecutor is not supported" in result.stderr
    assert "first difference" not in result.stdout


@pytest.mark.slow
def test_a_sampler_that_returns_no_experts_is_compared_without_replay(
    moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = HfExecutor.build

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        if options.get("enable_return_routed_experts"):
            raise UnsupportedError("enable_return_routed_experts", "this one records none")
        build(self, *args, **options)

    monkeypatch.setattr(HfExecutor, "build", refuse)
    result = parity(moe_folder)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "routes are not replayed: enable_return_routed_experts is not supported: this one records" in result.stderr
    assert "64" in result.stdout and "replay" not in result.stdout


@pytest.mark.slow
def test_a_dense_model_and_prompts_of_text(qwen2_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("1+2\n\n3*4=\n")
    found = report_of(qwen2_folder, "--prompts", str(prompts), "--no-layers", "--infer-option", "max_num_seqs=3")
    assert found["without_replay"] is None
    assert found["routes_apart"] is None
    assert (found["layers"], found["first"], found["largest"]) == ([], None, None)
    assert found["infer_options"] == {"max_num_seqs": 3}


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--dtype", "int8"], "dtype must be one of float32, bfloat16, got 'int8'", 1),
        (["--infer", "vlm"], "vlm", 1),
        (["--train", "cupu"], "cupu", 1),
        (["--infer-option", "dtype"], "give NAME=VALUE, got 'dtype'", 2),
        (["--infer-option", "max_num_seq=3"], "max_num_seqs", 1),
        (["--prompts", "/nowhere"], "/nowhere cannot be read as text", 2),
        (["--prompts", "/dev/null"], "/dev/null has no prompt; write one a line", 2),
        (["--tokens", "4000"], "the model has", 1),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(
    qwen2_folder: Path, arguments: list[str], message: str, code: int
) -> None:
    result = parity(qwen2_folder, *arguments)
    said = str(result.exception) if code == 1 else result.output.replace("\n", " ")
    assert message in " ".join(said.split()), said
    assert result.exit_code == code
    assert code == 2 or isinstance(result.exception, rlcore.RlcoreError)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    result = parity(tmp_path)
    assert isinstance(result.exception, rlcore.RlcoreError)
    assert "config.json" in str(result.exception)


# ------------------------------------------------------------------------------------------- parts and numbers


def test_statistics_are_those_of_their_definitions() -> None:
    apart = 0.3 * torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, ratio = LogProbAgreement.of(apart), apart.exp()
    assert found.tokens == 4000
    assert sum(apart.abs() > found.p99) == 39
    assert sum(ratio > found.ratio_p99) == 39
    assert (found.max, found.ratio_max) == (float(apart.abs().max()), float(ratio.max()))
    share = float(ratio.sum() ** 2 / (4000 * ratio.square().sum()))
    assert_within_rounding(found.lost, 1 - share, terms=3 * len(apart), magnitude=1.0)
    assert_within_rounding(found.ratio_mean, float(ratio.mean()), terms=len(apart))
    parts = by_position(apart.view(100, 40), 8)
    assert [(part.start, part.stop) for part in parts] == [(at, at + 5) for at in range(0, 40, 5)]
    assert_within_rounding(
        parts[2].mean, float(apart.view(100, 40)[:, 10:15].abs().mean()), terms=apart.view(100, 40)[:, :5].numel()
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens", "embedding"),
        ("model.layers.12.self_attn", "layers.12.attention"),
        ("model.language_model.layers.3.mlp.gate", "layers.3.router"),
        ("model.layers.3.block_sparse_moe", "layers.3.mlp"),
        ("model.layers.3", "layers.3.layer"),
        ("model.layers.3.self_attn.q_norm", None),
        ("model.layers.3.mlp.experts", None),
        ("model.norm", "norm"),
        ("logits_processor", "head"),
        ("model", None),
    ],
)
def test_parts_have_common_names(name: str, part: str | None) -> None:
    assert part_of(name) == part


def test_a_layer_of_vllm_gives_its_residual_apart() -> None:
    class Layer(torch.nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, 2 * hidden

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Layer()])
    with recording(model) as found:
        model.layers[0](torch.ones(1, 3, 4))
    model.layers[0](torch.zeros(1, 3, 4))
    assert found.keys() == {"layers.0.layer"}
    assert torch.equal(found["layers.0.layer"], torch.full((3, 4), 3.0))


def test_differences_are_in_the_order_of_the_model() -> None:
    names = ["head", "layers.10.attention", "layers.2.mlp", "norm", "embedding", "layers.2.attention"]
    ours = {name: torch.ones(4) for name in names}
    assert in_order(names) == [
        "embedding", "layers.2.attention", "layers.2.mlp", "layers.10.attention", "norm", "head"
    ]  # fmt: skip
    theirs = ours | {"layers.2.mlp": 1.01 * torch.ones(4), "norm": 1.5 * torch.ones(4), "head": torch.ones(5)}
    parts = compare(ours, theirs)
    first, largest = first_difference(parts), largest_growth(parts)
    assert [part.name for part in parts] == in_order(names)[:-1], "results of another shape are left out"
    assert first is not None
    assert largest is not None
    assert (first.name, largest.name) == ("layers.2.mlp", "norm")
    assert first_difference(compare(ours, ours)) is largest_growth(compare(ours, ours)) is None


def test_activations_are_refused_where_there_are_none(qwen2_folder: Path) -> None:
    with rlcore.InferenceEngine(qwen2_folder) as engine:
        engine.build(devices="cpu")
        assert engine.activations([1, 2, 3])["embedding"].shape == (3, 32)
        with pytest.raises(InvalidInputError, match="prompt 0 must be"):
            engine.activations([1.5])  # type: ignore[list-item]
