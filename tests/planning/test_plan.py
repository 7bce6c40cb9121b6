"""``rlcore.plan``: phases, layouts that fit, seconds of a record, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.engines.fsdp2.sharding import Sharding
from rlcore.engines.memory_plan.ranks import gathered
from rlcore.errors import BenchError, CheckpointError, InvalidInputError, UnsupportedError
from rlcore.logit_form import measure_logit_form
from rlcore.planning.configuration import arguments_of
from rlcore.planning.hardware import hardware
from rlcore.planning.model import planned_model
from rlcore.planning.rates import Rates
from rlcore.planning.traces import cache_bytes_per_token
from tests.planning import peaks

GIB = 1 << 30
CONFIG = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}  # fmt: skip
VALUES = 2 * (256 * (4 + 2 + 2 + 4) * 64 + (4 + 2 + 2) * 64 + 3 * 256 * 768 + 2 * 256) + 4096 * 256 + 256
"""Parameters: projections and their biases, MLP and norms of two layers, the embedding, the last norm."""
PEAKS = json.loads(Path(peaks.__file__).with_name("peaks_h200.json").read_text("utf-8"))
LEAST, MOST = 0.98, 1.05
"""The promise of a plan, as parts of what is measured."""
KNOWN_BELOW = {("llama-3.2-1b", "bfloat16, 24k, offload"): 0.93}
"""The one that does not keep it; see docs/plan.md."""
FIXED: dict[str, Any] = {"longest": 256, "max_tokens": 512, "recompute": True}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.fixture(scope="module")
def found(config_file: Path) -> Any:
    return rlcore.plan(config_file, device="h200", tensor_parallel=1, **FIXED)


def test_a_plan_has_all_phases_and_says_what_to_write(found: Any) -> None:
    phases = {phase.name: phase for phase in found.best.phases}
    assert list(phases) == ["sample", "score", "train", "sync"]
    assert found.fits and found.largest_max_tokens >= 512
    assert 4 * VALUES <= phases["score"].parts["weights"] < 4.1 * VALUES
    assert 8 * VALUES <= phases["train"].parts["optimizer"] < 8.2 * VALUES
    assert phases["sample"].parts["sampler's weights"] == 2 * VALUES
    for phase in phases.values():
        assert phase.device_bytes == sum(phase.parts.values())
    text = str(found)
    assert "train.build(compute_dtype='bfloat16', activation_checkpointing=True)" in text
    assert "It fits" in text and "on 1 x h200, 139.80 GiB each" in text
    assert json.loads(json.dumps(found.as_dict()))["fits"] is True


def test_less_memory_moves_more_and_then_does_not_fit(config_file: Path) -> None:
    room = hardware("h200").context_bytes + 16 * VALUES
    small = rlcore.plan(config_file, device="h200", memory_bytes=room, sampler=False, **FIXED)
    assert not small.fits
    text = str(small)
    assert "It does not fit" in text and "what helps" in text and small.largest_max_tokens == 0
    assert [phase.name for phase in small.best.phases] == ["score", "train"]


@pytest.mark.slow
def test_shards_divide_what_is_held_and_gather_the_rest(config_file: Path, found: Any) -> None:
    four = rlcore.plan(config_file, device="h200", count=4, replicas=1, tensor_parallel=2, **FIXED)
    one, cut = ({phase.name: phase for phase in plan.best.phases}["train"].parts for plan in (found, four))
    steps = 4 * len(list(four.model.module.parameters()))  # a count of steps for each parameter is on every device
    assert cut["weights"] == -(-one["weights"] // 4) and cut["buffers"] == one["buffers"]
    assert cut["optimizer"] == steps + -(-(one["optimizer"] - steps) // 4)
    layers = VALUES - 4096 * 256 - 256
    assert cut["gathered weights"] == 2 * (VALUES + layers) + layers // 2  # both layers are one group, which is cast
    assert cut["gradients"] == 4 * VALUES
    assert "data_parallel_size=4" in str(four) and "tensor_parallel_size=2" in str(four)
    module = planned_model(config_file).module
    layer = (VALUES - 4096 * 256 - 256) // 2
    alone = gathered(module, Sharding(gather_bytes=0), 4)
    assert alone.weights == 4 * (4096 * 256 + 256 + 2 * layer)  # in float32, a layer and the buffer of its exchange
    kept = gathered(module, Sharding(gather_bytes=0, reshard_after_forward=False), 4)
    assert kept.weights - alone.weights == 4 * layer  # the other layer
    assert (alone.exchange, alone.overlapping, alone.whole_gradients) == (9 * layer, 12 * layer, 4 * VALUES)


@pytest.mark.slow
def test_layouts_are_looked_for_and_the_best_are_shown(config_file: Path) -> None:
    plan = rlcore.plan(config_file, device="h200", count=2, longest=64, recompute=False)
    layouts = [one.layout for one in (plan.best, *plan.others)]
    assert plan.best.layout.shards == 1 and len(layouts) == len(set(layouts)) > 2
    assert all(one.fits for one in plan.others)
    assert "the next best:" in str(plan)


def test_what_is_printed_is_80_columns_wide_and_no_part_of_it_is_cut(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_file.parent)
    options = {"compute_dtype": "bfloat16", "dtype": "float32", "gather_bytes": 1 << 20, "reshard_after_forward": True}
    plan = rlcore.plan(config_file.name, device="h200", count=2, memory_bytes=GIB, options=options, **FIXED)
    text = str(plan)
    assert "It does not fit" in text and max(map(len, text.splitlines())) <= 80
    shown = " ".join(text.split())
    for phase in plan.best.phases:
        for name, size in phase.parts.items():
            assert size < GIB // 100 or f"{name} {size / GIB:.2f}" in shown
    called = f"train.build({', '.join(f'{name}={value!r}' for name, value in plan.options.items())}"
    assert called in shown


@pytest.mark.slow
def test_devices_share_sequences_where_nothing_fits_otherwise(config_file: Path) -> None:
    given: dict[str, Any] = {
        "device": "h200", "count": 4, "longest": 16384, "max_tokens": 16384, "recompute": True, "sampler": False,
    }  # fmt: skip
    apart, two = (rlcore.plan(config_file, sequence_parallel=size, **given) for size in (1, 2))
    assert apart.best.layout.sequence_parallel == 1 and two.best.layout.shards in {2, 4}
    assert abs(2 * two.best.flops - apart.best.flops) < apart.best.flops // 100
    most, of_two = (max(phase.device_bytes for phase in plan.best.phases) for plan in (apart, two))
    less = rlcore.plan(config_file, memory_bytes=(most + of_two) // 2, **given)
    assert of_two < most and less.fits and less.best.layout.sequence_parallel == 2
    assert "sequence_parallel_size=2" in str(less)
    assert rlcore.plan(config_file, **given).best.layout.sequence_parallel == 1


def test_keys_and_values_of_a_token(config_file: Path) -> None:
    assert cache_bytes_per_token(planned_model(config_file)) == 2 * 2 * 2 * 64 * 2  # layers, heads, width, 16 bits


MAMBA = {"model_type": "mamba", "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1, "vocab_size": 512}
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip


def _written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "nbytes"), [(MAMBA, 0), (QWEN3_NEXT, 2 * 2 * 16 * 2)], ids=["no layer", "one layer of four"]
)
def test_layers_without_attention_keep_nothing_for_a_token(tmp_path: Path, config: dict[str, Any], nbytes: int) -> None:
    assert cache_bytes_per_token(planned_model(_written(tmp_path, config))) == nbytes


def test_a_model_without_a_cache_leaves_the_device_for_none(tmp_path: Path) -> None:
    plan = rlcore.plan(_written(tmp_path, MAMBA), device="h200", longest=32, max_tokens=32, recompute=False)
    assert plan.fits and plan.best.layout.offload == () and plan.best.kv_tokens == 0


JETMOE = {
    "model_type": "jetmoe", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "kv_channels": 16,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "num_local_experts": 2, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(("sampler", "part"), [(True, "the keys and values"), (False, "a step")])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG | {"hidden_size": 320, "num_attention_heads": 5},
        JETMOE,  # it runs, but not without values
    ],
    ids=["heads that key heads do not divide", "jetmoe"],
)
def test_a_configuration_that_the_models_own_code_cannot_run_is_named(
    tmp_path: Path, config: dict[str, Any], sampler: bool, part: str
) -> None:
    told = rf"a plan of {part} of .* is not supported: its code fails on meta tensors with [A-Za-z]+Error: "
    with pytest.raises(UnsupportedError, match=told) as failed:
        rlcore.plan(_written(tmp_path, config), device="h200", sampler=sampler, **FIXED)
    assert "config.json" not in str(failed.value)


def test_latent_attention_is_planned_whose_values_are_narrower_than_its_keys(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 512,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    plan = rlcore.plan(_written(tmp_path, config), device="h200", sampler=False, **FIXED)
    assert plan.fits and plan.best.flops > 0


def test_how_a_model_makes_logits_is_measured_once_for_all_traces(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []

    def measuring(model: Any, forward: Any) -> Any:
        measured.append(model)
        return measure_logit_form(model, forward)

    monkeypatch.setattr("rlcore.nn.measure_logit_form", measuring)
    rlcore.plan(config_file, device="h200", sampler=False, longest=32, max_tokens=32, recompute=False)
    assert len(measured) == 1


@pytest.mark.slow
def test_adapters_train_alone(config_file: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    plan = rlcore.plan(config_file, device="h200", lora=4, sampler=False, **FIXED)
    assert plan.model.num_trained < plan.model.num_parameters / 10
    train = plan.best.phases[-1].parts
    words = " ".join(str(plan).split())  # its lines are folded
    assert train["optimizer"] < train["weights"] and f"{plan.model.num_trained / 1e6:.2f} million trained" in words


@pytest.mark.slow
def test_a_module_of_the_users_own_is_planned_with_its_optimizer(config_file: Path) -> None:
    module = planned_model(config_file, optimizer=_sgd).module
    plan = rlcore.plan(module, device="cpu", sampler=False, options={}, **FIXED)
    assert "optimizer" not in plan.best.phases[-1].parts
    assert plan.device.total_bytes > GIB // 4


def _sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.1)


# ------------------------------------------------------------------------------------------- what was measured


@pytest.mark.slow
@pytest.mark.parametrize("run", PEAKS["runs"][::10], ids=lambda run: f"{run['model']}: {run['setup']}")
def test_a_plan_is_what_a_step_took_on_an_h200(run: dict[str, Any]) -> None:
    """Three models, each with another configuration; `python -m tests.planning.peaks --again FILE` takes all 24."""
    if run["model"].endswith("lora"):
        pytest.importorskip("peft", reason="peft is not installed")
    real = run["measured"]["train 2"]
    with peaks.as_recorded():
        plan = peaks.answered(run["model"], run["setup"])
    least = KNOWN_BELOW.get((run["model"], run["setup"]), LEAST)
    assert LEAST * real["peak"] <= plan["peak"] <= MOST * real["peak"], (plan, real)
    assert least * real["reserved"] <= plan["reserved"] <= MOST * real["reserved"], (plan, real)


# ------------------------------------------------------------------------------------------------------- seconds


def test_a_record_gives_ranges(config_file: Path, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates((1e12, 2e12), (1e9, 4e9), None)
    monkeypatch.setattr(Rates, "of", lambda file, device: rates)
    timed = rlcore.plan(config_file, device="h200", tensor_parallel=1, record="some.json", **FIXED)
    seconds = {phase.name: phase.seconds for phase in timed.best.phases}
    flops = found.best.flops
    assert seconds["train"] == (flops / 2e12, flops / 1e12) and seconds["sync"] == (VALUES / 2e9, 2 * VALUES / 1e9)
    assert seconds["sample"] is None and "not in the record" in str(timed)


@pytest.mark.slow
def test_rates_of_the_projects_own_records() -> None:
    results, device = Path(rlcore.__file__).parents[1] / "bench" / "results", hardware("h200")
    steps = Rates.of(results / "train-h200.json", device)
    assert steps.flops_per_s is not None and 1e14 < steps.flops_per_s[0] <= steps.flops_per_s[1] < 1e15
    syncs = Rates.of(results / "vllm-h200.json", device)
    assert syncs.flops_per_s is None and syncs.sync_bytes_per_s is not None and syncs.sync_bytes_per_s[0] > 1e11
    with pytest.raises(InvalidInputError, match="has measured no training step and no weight sync"):
        Rates.of(results / "startup-cpu.json", device)


def test_a_file_that_is_no_record_is_refused(config_file: Path) -> None:
    with pytest.raises(BenchError):
        rlcore.plan(config_file, device="h200", record=config_file, **FIXED)


# ------------------------------------------------------------------------------------------- what is given wrong


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "h20"}, r"no device 'h20' is known or here; did you mean 'h200'\?; known without being here: h200"),
        ({"longest": 512, "max_tokens": 256}, r"max_tokens=256 is less than longest=512.*raise it"),
        ({"prompt_tokens": 4096}, "prompt_tokens must be from 0 to below longest=4096"),
        ({"count": 0}, "plan.. takes a whole number from 1 to 1,048,576, or None as count, got 0"),
        (
            {"count": 99_999_999_999},
            "plan.. takes a whole number from 1 to 1,048,576, or None as count, got 99999999999",
        ),
        ({"memory_bytes": -1}, "plan.. takes a whole number of at least 1, or None as memory_bytes, got -1"),
        ({"replicas": 0}, "plan.. takes a whole number of at least 1, or None as replicas, got 0"),
        ({"prompt_tokens": "x"}, "plan.. takes a whole number as prompt_tokens, got 'x'"),
        ({"device": 3}, "plan.. takes a str, or None as device, got 3"),
        ({"sampler": "x"}, "plan.. takes True or False as sampler, got 'x'"),
        ({"lora": "x"}, "plan.. takes a whole number of at least 1, or a mapping, or None as lora, got 'x'"),
        ({"optimizer": "adam"}, "plan.. takes a function, or None as optimizer, got 'adam'"),
        ({"record": 3}, "plan.. takes a non-empty str or Path, or None as record, got 3"),
        ({"count": 4, "replicas": 3}, "replicas must divide the 4 devices, got 3"),
        ({"count": 3, "tensor_parallel": 3}, "tensor_parallel must divide the 4 attention heads, got 3"),
        ({"options": {"compute": "bfloat16"}}, "options= of plan.. are those of the fsdp2 executor's build"),
        ({"options": {"compile": True}}, "options= of plan.. has compile: plans do not know it"),
        ({"options": {"replicas": 2}}, "give it as replicas="),
        ({"options": {"sequence_parallel_size": 2}}, "give it as sequence_parallel="),
        ({"options": {"tensor_parallel_size": 2}}, "has tensor_parallel_size: plans do not know it"),
        ({"count": 4, "replicas": 2, "sequence_parallel": 4}, "sequence_parallel must divide the 2 devices of a copy"),
        ({"recompute": "full"}, "activation_checkpointing must be False, True or 'selective', got 'full'"),
        ({"lora": {"rank": 4}}, "lora=.*cannot be added to this model"),
    ],
)
def test_what_a_plan_refuses(config_file: Path, given: dict[str, Any], message: str) -> None:
    if "lora" in given:
        pytest.importorskip("peft", reason="peft is not installed")
    with pytest.raises(InvalidInputError, match=message):
        rlcore.plan(config_file, **{"device": "h200", **given})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config.json is no configuration of a model: FileNotFoundError.*name a model folder"),
        ("{", "is no configuration of a model: JSONDecodeError"),
        ("{}", "has no model_type"),
        ('{"model_type": "no such"}', "transformers cannot read"),
        ('{"model_type": "t5"}', "is a 't5' model, which is not a causal language model"),
        ('{"model_type": "qwen2", "hidden_size": 10, "num_attention_heads": 0}', "no model can be made of|cannot read"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        planned_model(tmp_path)


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"a plan takes a model folder, a config.json.*got int"):
        rlcore.plan(7)


def test_a_file_of_rlcore_train_is_planned_as_it_says(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = "model: M\ndata: {train: d.jsonl, reward: 'm:f'}\nplacement: shared\n"
    text += "rollout: {max_tokens: 100, max_staleness: 0}\n"
    file.write_text(text + "trainer: {data_parallel_size: 2, options: {replicas: 2, activation_checkpointing: true}}\n")
    found = arguments_of(str(file))
    assert {name: found[name] for name in ("model", "count", "replicas", "recompute", "longest", "sampler")} == {
        "model": "M", "count": 4, "replicas": 2, "recompute": True, "longest": 200, "sampler": True,
    }  # fmt: skip
    file.write_text(text + "trainer: {data_parallel_size: 2, options: {sequence_parallel_size: 4}}\n")
    shared = arguments_of(str(file))
    assert (shared["count"], shared["sequence_parallel"], shared["options"]) == (8, 4, {})
    file.write_text(text + "trainer: {executor: deepspeed}\n")
    with pytest.raises(UnsupportedError, match="plans follow the steps of fsdp2"):
        arguments_of(str(file))


@pytest.mark.slow
def test_the_lines_in_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(rlcore.__file__).parents[1] / "docs" / "plan.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "Qwen2.5-1.5B").mkdir()
    (tmp_path / "Qwen2.5-1.5B" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    exec(block, {"rlcore": rlcore})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["sample", "score", "train", "sync"]
