"""The hf executor against transformers' own generate and plain forward passes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.completion import RequestOutput, VersionSpan
from rlcore.engines.sampling.hf.executor import HfExecutor
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import params_of_each
from rlcore.errors import (
    CheckpointError,
    InvalidInputError,
    RlcoreError,
    StateError,
    UnsupportedError,
)
from tests.accuracy import assert_as_accurate

from .plain_sampling import restricted
from .plain_training import keep_float64

# Lengths 1 to 9 in no order, two equal prompts, and one that is the end of another.
PROMPTS = [[4, 7, 10], [1], [8, 5, 2, 10, 3, 9, 0, 11, 12], [7, 10], [4, 7, 10], [2, 2, 2, 2, 2, 13]]


def context(**options: Any) -> WorkerContext:
    return WorkerContext("the inference engine", rank=0, world_size=1, device_name="cpu", number=1, **options)


def build(folder: Path, **options: Any) -> HfExecutor:
    worker = HfExecutor(context())
    worker.build(folder, **options)
    return worker


def generate(worker: HfExecutor, prompts: Any, params: Any = None, *, version: int) -> list[RequestOutput]:
    """Call the worker as an engine does: with parsed parameters for each prompt."""
    return worker.generate(prompts, params_of_each(prompts, params), version=version)


@pytest.fixture(scope="module")
def worker(qwen2_folder: Path) -> HfExecutor:
    return build(qwen2_folder)


@pytest.fixture(scope="module")
def learned_positions_folder(write_checkpoint: Callable[..., Path], characters: str) -> Path:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=len(characters), n_embd=32, n_layer=2, n_head=2, n_positions=32, initializer_range=0.4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return write_checkpoint(config)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def greedy_alone(module: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy continuation of one prompt, never padded and never stopped."""
    ids = torch.tensor([prompt])
    config = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
    generated = module.generate(ids, attention_mask=torch.ones_like(ids), **config)
    return generated[0, len(prompt) :].tolist()


def in_float64(module: Any) -> Any:
    return keep_float64(deepcopy(module).double())


def sampled_logprobs(module: Any, outputs: list[RequestOutput], params: SamplingParams) -> Tensor:
    """Return the log-probs of all completions' tokens, each completion by one unpadded forward without a cache."""
    sampling = {"temperature": params.temperature or 1.0, "top_p": params.top_p, "top_k": params.top_k}
    found = []
    for output in outputs:
        for completion in output.outputs:
            ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
            with torch.no_grad():
                logits_TV = module(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
            wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            logprob_TV = restricted(wide_TV, **(sampling if params.temperature else {}))
            found.append(logprob_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0])
    return torch.cat(found)


def assert_logprobs(worker: HfExecutor, outputs: list[RequestOutput], params: SamplingParams) -> None:
    got = torch.tensor([logprob for output in outputs for one in output.outputs for logprob in one.logprobs])
    reference, exact = (sampled_logprobs(one, outputs, params) for one in (worker.module, in_float64(worker.module)))
    assert exact.isfinite().all()
    assert_as_accurate(got, reference, exact)


@pytest.mark.parametrize("folder", ["qwen2_folder", "llama_folder", "learned_positions_folder"])
def test_greedy_equals_transformers_for_each_prompt_alone(folder: str, request: pytest.FixtureRequest) -> None:
    worker = build(request.getfixturevalue(folder))
    outputs = generate(worker, PROMPTS, {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}, version=0)
    assert tokens(outputs) == [[greedy_alone(worker.module, prompt, 20)] for prompt in PROMPTS]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 5  # prompts 0 and 4 are equal


def test_prompts_longer_than_one_prefill_pass_give_the_same(
    worker: HfExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"temperature": 0.0, "max_tokens": 8}
    whole = generate(worker, PROMPTS, params, version=0)
    monkeypatch.setattr("rlcore.engines.sampling.hf.decoding._MAX_PREFILL_TOKENS", 10)  # two columns a pass
    parts = generate(worker, PROMPTS, params, version=0)
    assert tokens(parts) == tokens(whole)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0, "n": 1},
        {"top_k": 4},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(worker: HfExecutor, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"n": 3, "max_tokens": 12, "seed": 5, **options})
    assert_logprobs(worker, generate(worker, PROMPTS, params, version=0), params)


def test_sampled_frequencies_are_the_models_probabilities(worker: HfExecutor) -> None:
    count = 8000
    (output,) = generate(worker, [[4, 7, 10]], {"n": count, "max_tokens": 1, "temperature": 3.0, "seed": 1}, version=0)
    with torch.no_grad():
        want_V = (worker.module(torch.tensor([[4, 7, 10]])).logits[0, -1].double() / 3.0).softmax(0) * count
    counted_V = torch.tensor([c.token_ids[0] for c in output.outputs]).bincount(minlength=len(want_V)).double()
    is_common = want_V >= 5
    chi_square = ((counted_V - want_V) ** 2 / want_V)[is_common].sum()
    assert is_common.sum() > 10
    assert chi_square < 45.3  # 20 degrees of freedom: once in a thousand seeds


def test_a_request_gives_the_same_samples_whatever_its_companions(worker: HfExecutor, qwen2_folder: Path) -> None:
    mine = SamplingParams(n=4, max_tokens=15, temperature=1.3, top_p=0.9, seed=11)
    other = SamplingParams(n=2, max_tokens=30, temperature=0.8, seed=12)
    alone = generate(worker, [PROMPTS[0]], mine, version=0)
    first = generate(worker, [PROMPTS[0], PROMPTS[2]], [mine, other], version=0)
    last = generate(worker, [*PROMPTS[1:4], PROMPTS[0]], [other, {"temperature": 0}, other, mine], version=0)
    split = generate(build(qwen2_folder, max_num_seqs=3), [PROMPTS[0], PROMPTS[2]], [mine, other], version=0)
    assert tokens(alone)[0] == tokens(first)[0] == tokens(last)[3] == tokens(split)[0]
    assert len(set(map(tuple, tokens(alone)[0]))) == 4


@pytest.mark.slow
def test_smaller_batches_give_the_same(worker: HfExecutor, qwen2_folder: Path) -> None:
    params = {"n": 3, "seed": 3, "max_tokens": 10}
    whole = tokens(generate(worker, PROMPTS, params, version=0))
    for limits in ({"max_num_seqs": 1}, {"max_num_seqs": 5}, {"max_num_tokens": 60}):
        assert tokens(generate(build(qwen2_folder, **limits), PROMPTS, params, version=0)) == whole, limits


def test_seeds_decide_the_samples(worker: HfExecutor) -> None:
    def sample(**options: Any) -> list[list[list[int]]]:
        return tokens(generate(worker, [PROMPTS[2]] * 2, {"max_tokens": 20, **options}, version=0))

    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    assert sample(seed=1)[0] == sample(seed=1)[1]
    torch.manual_seed(0)
    first, second = sample(), sample()
    torch.manual_seed(0)
    assert sample() == first != second
    assert first[0] != first[1]  # without a seed, equal prompts get their own


def test_a_stop_token_ends_a_completion_and_is_its_last_token(worker: HfExecutor, characters: str) -> None:
    free = generate(worker, PROMPTS, {"n": 8, "seed": 0, "max_tokens": 12, "ignore_eos": True}, version=0)
    stops = (characters.index("="), characters.index("3"))
    params = {"n": 8, "seed": 0, "max_tokens": 12, "stop_token_ids": stops, "ignore_eos": True}
    reasons = set()
    for output, whole in zip(generate(worker, PROMPTS, params, version=0), free, strict=True):
        for completion, uncut in zip(output.outputs, whole.outputs, strict=True):
            ends = [i for i, token in enumerate(uncut.token_ids) if token in stops]
            length = ends[0] + 1 if ends else 12
            assert completion.token_ids == uncut.token_ids[:length]
            assert completion.finish_reason == ("stop" if ends else "length")
            spoken = completion.token_ids[:-1] if ends else completion.token_ids
            assert completion.text == "".join(characters[t] for t in spoken).replace("$", "")
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_the_models_own_end_of_sequence_token_stops_unless_ignored(worker: HfExecutor, characters: str) -> None:
    eos = characters.index("$")
    params = {"n": 64, "seed": 0, "max_tokens": 30, "temperature": 2.0}
    (stopping,) = generate(worker, [[1]], params, version=0)
    (free,) = generate(worker, [[1]], params | {"ignore_eos": True}, version=0)
    assert all((c.token_ids[-1] == eos) == (c.finish_reason == "stop") for c in stopping.outputs)
    assert all(eos not in c.token_ids[:-1] for c in stopping.outputs)
    assert any(c.finish_reason == "stop" and len(c.token_ids) < 30 for c in stopping.outputs)
    assert all(len(c.token_ids) == 30 and c.finish_reason == "length" for c in free.outputs)


def test_each_prompt_may_have_its_own_parameters(worker: HfExecutor) -> None:
    params = [
        {"max_tokens": m, "n": n, "ignore_eos": True} for m, n in [(3, 2), (1, 1), (7, 4), (2, 1), (9, 1), (5, 3)]
    ]
    outputs = generate(worker, PROMPTS, params, version=0)
    assert [[len(c.token_ids) for c in o.outputs] for o in outputs] == [[p["max_tokens"]] * p["n"] for p in params]
    assert [o.prompt_token_ids for o in outputs] == PROMPTS
    assert all(len(c.logprobs) == len(c.token_ids) for o in outputs for c in o.outputs)


def test_equal_prompts_are_prefilled_once(worker: HfExecutor) -> None:
    rows: list[int] = []
    handle = worker.module.register_forward_pre_hook(
        lambda _module, _args, inputs: rows.append(len(inputs["input_ids"])), with_kwargs=True
    )
    generate(worker, PROMPTS, {"n": 4, "max_tokens": 2, "ignore_eos": True}, version=0)
    handle.remove()
    assert rows == [5, 24]  # five distinct prompts, then six times four samples; the last token is not fed


@pytest.mark.slow
def test_greedy_stays_that_of_transformers_while_the_cache_grows_and_shrinks(worker: HfExecutor) -> None:
    lengths = [70, 3, 45, 60, 20, 71]  # blocks are of 32 columns
    params = [{"temperature": 0.0, "max_tokens": length, "ignore_eos": True} for length in lengths]
    outputs = generate(worker, PROMPTS, params, version=0)
    assert tokens(outputs) == [
        [greedy_alone(worker.module, prompt, length)] for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]


def test_sliding_windows_give_the_same_as_transformers(
    write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]
) -> None:
    from transformers import Qwen2Config

    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    worker = build(write_checkpoint(Qwen2Config(**tiny_config, **window)))
    assert worker.module.config.layer_types == ["full_attention", "sliding_attention"]
    outputs = generate(worker, PROMPTS, {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}, version=0)
    assert tokens(outputs) == [[greedy_alone(worker.module, prompt, 20)] for prompt in PROMPTS]


def test_rows_that_ended_leave_the_batch(worker: HfExecutor) -> None:
    rows: list[int] = []
    handle = worker.module.register_forward_pre_hook(
        lambda _module, _args, inputs: rows.append(len(inputs["input_ids"])), with_kwargs=True
    )
    params = [SamplingParams(max_tokens=m, ignore_eos=True) for m in (6, 2, 2, 2, 2, 4)]
    generate(worker, PROMPTS, params, version=0)
    handle.remove()
    assert rows == [5, 6, 2, 2, 1, 1]


def test_a_row_that_ended_may_wait_beyond_the_last_position(learned_positions_folder: Path) -> None:
    worker = build(learned_positions_folder)
    long, short = [1] * 28, [[token] for token in range(10)]
    params = [{"max_tokens": 4, "temperature": 0.0}, *[{"max_tokens": 31, "temperature": 0.0}] * 10]
    outputs = generate(worker, [long, *short], params, version=0)
    assert tokens(outputs)[3] == [greedy_alone(worker.module, short[2], 31)]


def test_progress_counts_every_completion(qwen2_folder: Path) -> None:
    heard: list[int] = []
    worker = HfExecutor(context(emit=heard.append))
    worker.build(qwen2_folder)
    generate(worker, PROMPTS, {"n": 4, "max_tokens": 9, "seed": 0}, version=0)
    assert sum(heard) == 24
    assert min(heard) >= 0


def test_prompts_may_be_texts_and_token_ids(worker: HfExecutor, characters: str) -> None:
    text = "47+ 8="
    token_ids = [characters.index(c) for c in text]
    params = {"seed": 4, "max_tokens": 8}
    first, second, third = generate(worker, [text, token_ids, "1"], params, version=0)
    assert (first.prompt, second.prompt, third.prompt) == (text, None, "1")
    assert first.prompt_token_ids == second.prompt_token_ids == token_ids
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_completions_carry_the_version_of_the_weights(worker: HfExecutor) -> None:
    (output,) = generate(worker, [[1, 2]], {"max_tokens": 5, "ignore_eos": True}, version=7)
    assert output.prompt is None
    assert output.outputs[0].version_spans == (VersionSpan(7, 0, 5),)


def test_no_prompts_give_no_outputs(worker: HfExecutor) -> None:
    assert generate(worker, [], version=0) == []


def test_the_module_is_ready_for_inference(worker: HfExecutor) -> None:
    assert not worker.module.training
    assert not any(parameter.requires_grad for parameter in worker.module.parameters())


def test_weights_changed_in_place_are_used_at_once(qwen2_folder: Path) -> None:
    worker = build(qwen2_folder)
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    before = tokens(generate(worker, PROMPTS, params, version=0))
    with torch.no_grad():
        for parameter in worker.module.parameters():
            parameter.mul_(-0.5)
    after = tokens(generate(worker, PROMPTS, params, version=1))
    assert after != before
    assert after == [[greedy_alone(worker.module, prompt, 20)] for prompt in PROMPTS]


def test_without_a_tokenizer_text_is_empty(qwen2_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(qwen2_folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    worker = build(folder)
    assert worker._reader.tokenizer is None
    (output,) = generate(worker, [[1, 2]], {"max_tokens": 5}, version=0)
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids
    with pytest.raises(InvalidInputError, match="no tokenizer; give prompts as token ids"):
        generate(worker, ["47"], version=0)


def test_bfloat16_weights_give_float32_logprobs(qwen2_folder: Path) -> None:
    worker = build(qwen2_folder, dtype="bfloat16")
    assert worker.module.dtype == torch.bfloat16
    params = SamplingParams(max_tokens=24, seed=0, ignore_eos=True)
    assert_logprobs(worker, generate(worker, [PROMPTS[2]], params, version=0), params)


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "prompt 1 is empty; give at least one token"),
        ([3, 21], {}, "prompt 1 holds token id 21; the model's token ids are 0 to 20"),
        ([-1, 3], {}, "prompt 1 holds token id -1; the model's token ids are 0 to 20"),
        (
            [1] * 250,
            {"max_tokens": 7},
            r"prompt 1 has 250 tokens and max_tokens is 7, together 257; the model has 256",
        ),
        (
            [1],
            {"stop_token_ids": [30]},
            "stop_token_ids of prompt 1 holds 30; the model's token ids are 0 to 20",
        ),
    ],
)
def test_bad_prompts_are_refused(worker: HfExecutor, prompt: list[int], params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        generate(worker, [[1, 2], prompt], [{}, params], version=0)


def test_a_prompt_may_fill_all_positions(worker: HfExecutor) -> None:
    (output,) = generate(worker, [[1] * 250], {"max_tokens": 6, "ignore_eos": True}, version=0)
    assert len(output.outputs[0].token_ids) == 6


def test_parameters_must_be_one_or_one_each(worker: HfExecutor) -> None:
    with pytest.raises(InvalidInputError, match="got 2 sampling parameters for 1 prompts"):
        generate(worker, [[1]], [{}, {}], version=0)


def test_generating_before_build_says_what_to_call() -> None:
    with pytest.raises(StateError, match=r"no model yet; call build\(path\)"):
        generate(HfExecutor(context()), [[1]], version=0)


def test_nan_weights_are_reported(qwen2_folder: Path) -> None:
    worker = build(qwen2_folder)
    with torch.no_grad():
        worker.module.get_input_embeddings().weight[3, 0] = torch.nan
    with pytest.raises(RlcoreError, match="Qwen2ForCausalLM gives NaN or infinite logits; its weights are damaged"):
        generate(worker, [[3, 4]], version=0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "floaty16"}, "dtype must be .* got 'floaty16'"),
        ({"dtype": "int64"}, "dtype must be .* got 'int64'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1 or None, got 0"),
        ({"max_num_tokens": -5}, "max_num_tokens must be a whole number of at least 1 or None, got -5"),
    ],
)
def test_bad_build_options_are_refused(qwen2_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build(qwen2_folder, **options)


def test_weights_that_lack_a_tensor_are_refused(qwen2_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    from safetensors.torch import load_file, save_file

    file = copy_of(qwen2_folder) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack 1 tensors of Qwen2ForCausalLM, such as 'model\.layers\.1\.mlp"):
        build(file.parent)


def test_weights_of_other_shapes_are_refused(qwen2_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(qwen2_folder)
    config = (folder / "config.json").read_text().replace('"intermediate_size": 64', '"intermediate_size": 48')
    (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"transformers cannot load .* as a causal language model"):
        build(folder)


@pytest.mark.slow
def test_a_folder_is_loaded_with_its_persistent_buffers(
    write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any], copy_of: Callable[[Path], Path]
) -> None:
    """Such as the bias by which the router of a GLM-4.5 or a DeepSeek-V3 corrects its choice of experts."""
    from safetensors.torch import load_file, save_file
    from transformers import Glm4MoeConfig

    config = Glm4MoeConfig(**tiny_config, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2)
    built = write_checkpoint(config)
    other = copy_of(built)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    worker = build(built)
    held = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    assert any(name.endswith("e_score_correction_bias") for name in held)
    worker.read_weights(other)
    worker.take_weights(version=1)
    assert all(torch.equal(tensor, held[name] + 1) for name, tensor in worker.module.state_dict().items())


def test_a_model_that_is_no_causal_language_model_is_refused(
    qwen2_folder: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(qwen2_folder)
    (folder / "config.json").write_text('{"model_type": "t5", "vocab_size": 21}')
    with pytest.raises(CheckpointError, match=r"transformers cannot load .* as a causal language model"):
        build(folder)


def test_an_architecture_without_positions_is_refused(write_checkpoint: Callable[..., Path]) -> None:
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=21, hidden_size=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    with pytest.raises(UnsupportedError, match=r"BloomForCausalLM in the hf executor is not supported: .*position_ids"):
        build(write_checkpoint(config))


def test_loading_shows_no_bar_of_transformers_and_leaves_its_bars_as_they_were(
    qwen2_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would stand amid the program's own display, and in its log."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        build(qwen2_folder)
        assert capfd.readouterr().err == ""
        assert logging.is_progress_bar_enabled()
        AutoModelForCausalLM.from_pretrained(qwen2_folder)
        assert "Loading weights" in capfd.readouterr().err, "or else this test shows nothing"
    finally:
        if not was_enabled:
            logging.disable_progress_bar()
