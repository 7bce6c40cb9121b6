"""Models that read images: prompts, batches and training with what sequences have beside their tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import rlcore
from rlcore.engines.executors.micro_batch import micro_batches
from rlcore.engines.rank_batch import WEIGHT, rank_batches
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.ops import ppo_clip
from rlcore.parallel_plans import Sizes
from rlcore.rollout import RolloutController, SingleTurn
from rlcore.sequence_input import SequenceInput
from tests.accuracy import assert_same_bits

from .image_agreement import check_logprobs, mixed_prompts, module_of, policy_of
from .image_models import (
    CONFIGS,
    IMAGE,
    ImageTruth,
    image_batch,
    inputs_of,
    model_class,
    prompt_of,
    tensors_of,
    write_model,
)
from .train_batches import assert_same_weights, packed_batch
from .train_policy import Build, Place, engines_of, places

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

slow = pytest.mark.slow
QWEN, LLAVA = "qwen2_5_vl", "llava"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = write_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def build(
    model_folder: Callable[[str], Path], shared_devices: tuple[str, ...], short_runtime_folder: Path
) -> Iterator[Build]:
    """``build(workers)``: engines of the Qwen2.5-VL."""
    folder = model_folder(QWEN)
    with engines_of(policy_of(QWEN), folder, shared_devices, short_runtime_folder) as get:
        yield get


# ---------------------------------------------------------------------------------------------- sampler and trainer


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", [QWEN, *(pytest.param(family, marks=slow) for family in CONFIGS if family != QWEN)])
def test_sampler_trainer_and_transformers_agree(family: str, device: str, model_folder: Callable[[str], Path]) -> None:
    """They do before and after a step, whose weights are synced: vision tower, projector and decoder."""
    prompts = mixed_prompts(family)
    sampling = {"n": 2, "max_tokens": 6, "seed": 3, "ignore_eos": True}
    with (
        rlcore.InferenceEngine(model_folder(family)).build(devices=device) as infer,
        rlcore.TrainEngine(module_of(family, infer.path)).build(colocate_with=infer) as train,
    ):
        for _ in range(2):
            outputs = infer.generate(prompts, sampling, progress=False)
            batch = rlcore.collate(outputs, advantages=torch.linspace(-1, 1, 8))
            check_logprobs(family, infer.path, outputs, batch, train, device=device)
            train.train_batch(batch, ppo_clip(), max_tokens_per_micro_batch=48)
            assert train.sync_weights(infer).fallback_bytes == 0


@slow
def test_a_sampled_image_token_is_a_token_like_others(model_folder: Callable[[str], Path]) -> None:
    """The model samples the token that stands for images, too; no image belongs to it."""
    with (
        rlcore.InferenceEngine(model_folder(QWEN)).build(devices="cpu") as infer,
        rlcore.TrainEngine(module_of(QWEN, infer.path)).build(colocate_with=infer) as train,
    ):
        prompts = [prompt_of(QWEN, seed=seed) for seed in range(40)]
        outputs = infer.generate(prompts, {"max_tokens": 8, "seed": 1}, progress=False)
        with_it = [output for output in outputs if IMAGE in output.outputs[0].token_ids[:-1]]
        assert len(with_it) >= 3
        check_logprobs(QWEN, infer.path, with_it, rlcore.collate(with_it), train)


@slow
def test_outputs_carry_the_images(model_folder: Callable[[str], Path]) -> None:
    """They do by both ways to ask, from a worker of another process, to which they were sent."""
    prompts = mixed_prompts(QWEN)
    sampling = {"max_tokens": 3, "seed": 5, "ignore_eos": True}
    with rlcore.InferenceEngine(model_folder(QWEN)).build(devices="cpu:4", launcher="process") as infer:
        generated = infer.generate(prompts, sampling, progress=False)
        numbers = infer.submit(prompts, sampling)
        collected: dict[int, Any] = {}
        while len(collected) < len(prompts):
            collected |= infer.collect()
        for ask in (infer.generate, infer.submit):
            with pytest.raises(InvalidInputError, match="prompt 1 has 1 images and no run of tokens for image 0"):
                ask([prompts[2], prompts[1] | {"input_ids": torch.tensor([[1, 2]])}])
    for prompt, output, later in zip(prompts, generated, [collected[one] for one in numbers], strict=True):
        assert output.outputs == later.outputs and output.inputs.keys() == later.inputs.keys()
        expected = {} if isinstance(prompt, list) else {k: v for k, v in prompt.items() if k != "input_ids"}
        assert output.inputs.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_bits(output.inputs[name], value)
            assert_same_bits(later.inputs[name], value)


def test_equal_tokens_with_other_images_have_random_numbers_of_their_own(model_folder: Callable[[str], Path]) -> None:
    first = prompt_of(QWEN, seed=1)
    other = first | {"pixel_values": torch.zeros_like(first["pixel_values"])}
    with rlcore.InferenceEngine(model_folder(QWEN)).build(devices="cpu") as infer:
        sampling = {"max_tokens": 12, "seed": 7, "temperature": 50.0, "ignore_eos": True}
        found = infer.generate([first, other, dict(first)], sampling, progress=False)
    tokens = [output.outputs[0].token_ids for output in found]
    assert tokens[0] == tokens[2] != tokens[1]


# --------------------------------------------------------------------------------------------------------- training


@places(
    ("cpu", 1, ()), ("cpu", 2, slow), ("cpu", 3, slow), ("cuda", 1, pytest.mark.gpu), ("cuda", 2, pytest.mark.multigpu)
)
def test_steps_are_those_of_a_plain_loop(build: Build, place: Place, model_folder: Callable[[str], Path]) -> None:
    """Sequences with and without images, in micro-batches of which some have none, on ranks of which some have none."""
    engine = build(place.workers, place.device)
    folder = model_folder(QWEN)
    texts = [[1, 2, 3], [4, 5, 6, 7, 8], [3, 2]]
    for number, prompts in enumerate((mixed_prompts(QWEN), [*texts, prompt_of(QWEN, seed=9)], texts)):
        batch = image_batch(prompts, num_new=6, seed=number)
        truth = ImageTruth(lambda: policy_of(QWEN).from_pretrained(folder), inputs_of(batch), place.device)
        engine.load_state_dict(engine.initial)  # type: ignore[attr-defined]
        engine.forget_steps()
        options: dict[str, Any] = {"max_tokens_per_micro_batch": 30}
        truth.assert_step(engine.train_batch(batch, ppo_clip(), **options), tensors_of(batch), ppo_clip())
        truth.assert_weights(engine.state_dict())
        truth.assert_logprobs(engine.forward_logprobs(batch, **options), tensors_of(batch))


def test_completions_of_one_prompt_share_its_images(build: Build, model_folder: Callable[[str], Path]) -> None:
    """The tower sees an image once, and its gradients are of all sequences that have it."""
    prompts = mixed_prompts(QWEN)
    batch = image_batch([prompts[0], prompts[0], prompts[1], prompts[2], prompts[0], prompts[1]], num_new=6)
    engine, folder = build(1), model_folder(QWEN)
    truth = ImageTruth(lambda: policy_of(QWEN).from_pretrained(folder), inputs_of(batch))
    truth.assert_step(engine.train_batch(batch, ppo_clip()), tensors_of(batch), ppo_clip())
    truth.assert_weights(engine.state_dict())
    seen: list[int] = []
    module = policy_of(QWEN).from_pretrained(folder)
    module.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    weight_T = tensors_of(batch)["loss_mask"].float()
    packed = {"input_ids": batch["input_ids"], "cu_seqlens": batch["cu_seqlens"], WEIGHT: weight_T}
    [own] = rank_batches(packed, 1, 200, inputs=module.prepare_inputs(packed, inputs_of(batch)))
    for part in micro_batches(own, weight_T != 0, 200, CPU):
        module.hidden_states(part.tokens)
    assert seen == [sum(len(one["pixel_values"]) for one in prompts[:2])]


def test_micro_batches_have_the_images_of_their_sequences() -> None:
    batch = image_batch(mixed_prompts(QWEN))
    tensors = tensors_of(batch)
    weight_T = tensors["loss_mask"].float()
    packed = {"input_ids": tensors["input_ids"], "cu_seqlens": tensors["cu_seqlens"], WEIGHT: weight_T}
    inputs = inputs_of(batch)
    sequences = tensors["input_ids"].split(tensors["cu_seqlens"].diff().tolist())
    seen = 0
    for num_ranks in (1, 2):
        for rank_batch in rank_batches(packed, num_ranks, 30, inputs=inputs):
            for part in micro_batches(rank_batch, rank_batch.packed[WEIGHT] != 0, 30, CPU):
                own = part.tokens["input_ids"].split(part.tokens["cu_seqlens"].diff().tolist())
                numbers = [next(n for n, one in enumerate(sequences) if one.equal(ids)) for ids in own]
                for name, value in inputs.items():
                    assert_same_bits(part.tokens[name], torch.cat([value.part(number) for number in numbers]))
                assert num_ranks == 1 or len(part.tokens["pixel_values"]), "a rank would leave out the vision tower"
                seen += len(part.targets_S)
    assert seen == 2 * int(weight_T.sum()), "each token is scored once"


@pytest.mark.parametrize("sizes", [Sizes(sequences=2), Sizes(tensor=2)])
def test_images_are_refused_where_ranks_share_a_sequence(sizes: Sizes, model_folder: Callable[[str], Path]) -> None:
    engine = rlcore.TrainEngine(module_of(QWEN, model_folder(QWEN)))
    engine._sizes = sizes
    batch = image_batch([prompt_of(QWEN)])
    with pytest.raises(UnsupportedError, match="build with data parallelism alone"):
        engine._prepared(tensors_of(batch), inputs_of(batch))


def changed(batch: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return batch | {name: SequenceInput.of([value] * (len(batch["cu_seqlens"]) - 1))}


def without(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in names}


GRID = "image_grid_thw"
BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "image tokens without images": (
        lambda batch: without(batch, "pixel_values", GRID),
        r"sequence 0 has 0 images, of 0 tokens, and 4 more image tokens \(20\), the first at 2",
    ),
    "more image tokens": (
        lambda batch: batch | {"input_ids": batch["input_ids"].index_fill(0, torch.tensor([7]), IMAGE)},
        "sequence 0 has 1 images, of 4 tokens, and 1 more image tokens",
    ),
    "fewer image tokens": (
        lambda batch: batch | {"input_ids": batch["input_ids"].index_fill(0, torch.tensor([3]), 1)},
        "no run of tokens for image 0, which is 4 times the token 20 in a row; it has 3 of them, the first at 2",
    ),
    "a grid of another image": (
        lambda batch: changed(batch, GRID, torch.tensor([[1, 4, 8]])),
        r"pixel_values of sequence 0 have shape \[16, 96\]; its image_grid_thw is of 32 patches, each of 96 numbers",
    ),
    "an odd grid": (
        lambda batch: changed(batch, GRID, torch.tensor([[1, 16, 1]])),
        r"image_grid_thw of sequence 0 is \[1, 16, 1\] for image 0; .* multiples of 2",
    ),
    "a grid of two numbers": (
        lambda batch: changed(batch, GRID, torch.tensor([[4, 4]])),
        r"must be whole numbers \[images, 3\]",
    ),
    "pixels alone": (
        lambda batch: without(batch, GRID),
        "takes pixel_values and image_grid_thw beside its tokens; got pix",
    ),
    "a video": (
        lambda batch: changed(batch, "pixel_values_videos", torch.zeros(2, 3)),
        "beside its tokens; got image_grid_thw, pixel_values, pixel_values_videos",
    ),
    "pixels as bytes": (
        lambda batch: changed(batch, "pixel_values", torch.zeros(16, 96, dtype=torch.uint8)),
        "give those of the model's processor, which are floating-point numbers",
    ),
    "images of another number of sequences": (
        lambda batch: batch | {GRID: SequenceInput.of([torch.tensor([[1, 4, 4]])] * 3)},
        "image_grid_thw of the batch is of 3 sequences, and the batch has 2",
    ),
    "a tensor in the place of rows": (
        lambda batch: batch | {"pixel_values": torch.zeros(16, 96)},
        "batch entry 'pixel_values' has shape .* what the model reads beside tokens is a rlcore.SequenceInput",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_images_that_do_not_fit_change_nothing(case: str, build: Build) -> None:
    spoil, message = BAD[case]
    engine, batch = build(1), image_batch([prompt_of(QWEN), prompt_of(QWEN)])
    for call in (
        lambda bad: engine.train_batch(bad, ppo_clip()),
        lambda bad: engine.eval_batch(bad, ppo_clip()),
        engine.forward_logprobs,
    ):
        if case.startswith("a tensor") and call == engine.forward_logprobs:
            continue  # it reads no entry of another name
        with pytest.raises(InvalidInputError, match=message):
            call(spoil(dict(batch)))
    assert_same_weights(engine.state_dict(), engine.initial)  # type: ignore[attr-defined]


def test_images_to_a_model_of_texts_are_refused(engine: rlcore.TrainEngine, qwen2_folder: Path) -> None:
    batch = packed_batch() | {"pixel_values": SequenceInput.of([torch.zeros(1, 3)] * 7)}
    with pytest.raises(InvalidInputError, match="has pixel_values beside its tokens, and Policy takes none of that"):
        engine.train_batch(batch, ppo_clip())
    with rlcore.InferenceEngine(qwen2_folder).build(devices="cpu") as infer:
        with pytest.raises(InvalidInputError, match=r"prompt 1 has pixel_values, and this engine reads no images"):
            infer.generate([[1], {"prompt_token_ids": [1, 2], "pixel_values": torch.zeros(1, 3)}], progress=False)
        with pytest.raises(InvalidInputError, match="token ids of one prompt as prompt_token_ids or input_ids"):
            infer.generate([{"input_ids": torch.ones(2, 3, dtype=torch.int64)}], progress=False)
        with pytest.raises(InvalidInputError, match=r"pixel_values of prompt 0 must be a tensor \[rows"):
            infer.generate([{"input_ids": [1], "pixel_values": [[1.0]]}], progress=False)


def test_an_image_of_a_size_that_the_model_cannot_read_is_refused(model_folder: Callable[[str], Path]) -> None:
    with rlcore.InferenceEngine(model_folder(LLAVA)).build(devices="cpu") as infer:
        prompt = prompt_of(LLAVA) | {"pixel_values": torch.zeros(1, 3, 16, 16)}
        with pytest.raises(InvalidInputError, match=r"cannot read an image of \[3, 16, 16\] numbers"):
            infer.generate([prompt], progress=False)


@slow
@pytest.mark.filterwarnings("ignore:The PEFT config's", "ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_of_the_language_part_train_alone(build: Build, model_folder: Callable[[str], Path]) -> None:
    import peft

    with rlcore.meta_device():
        module = policy_of(QWEN).from_pretrained(model_folder(QWEN))
        module.add_adapter(peft.LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)"))
    with (
        rlcore.InferenceEngine(model_folder(QWEN)).build(devices="cpu") as infer,
        rlcore.TrainEngine(module).build(colocate_with=infer) as train,
    ):
        before = train.state_dict(adapters="merged")
        outputs = infer.generate(mixed_prompts(QWEN), {"n": 4, "max_tokens": 6, "ignore_eos": True}, progress=False)
        batch = rlcore.collate(outputs, advantages=torch.linspace(-1, 1, 16))
        for _ in range(2):  # the first step moves B alone, which began at 0
            train.train_batch(batch, ppo_clip())
        after = train.state_dict(adapters="merged")
        names = {name for name, tensor in after.items() if not tensor.equal(before[name])}
        assert names and all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in names)
        assert not any("visual" in name for name in names)
        train.sync_weights(infer)
        again = infer.generate(mixed_prompts(QWEN), {"n": 2, "max_tokens": 8, "ignore_eos": True}, progress=False)
        check_logprobs(QWEN, infer.path, again, rlcore.collate(again), train)


@slow
def test_an_export_is_a_folder_that_everybody_reads(
    build: Build, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    (model_folder(QWEN) / "preprocessor_config.json").write_text("{}")
    engine = build(2)
    engine.train_batch(image_batch(mixed_prompts(QWEN)), ppo_clip())
    engine.export(tmp_path / "exported")
    assert (tmp_path / "exported" / "preprocessor_config.json").read_text() == "{}"
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert type(loaded) is model_class(QWEN)
    state = engine.state_dict()
    with rlcore.InferenceEngine(tmp_path / "exported").build(devices="cpu") as infer:
        outputs = infer.generate(mixed_prompts(QWEN), {"max_tokens": 6, "ignore_eos": True}, progress=False)
        check_logprobs(QWEN, tmp_path / "exported", outputs, rlcore.collate(outputs), engine)
    assert_same_weights(engine.state_dict(), state)


# ---------------------------------------------------------------------------------------------------------- rollout


def test_episodes_have_the_images_of_their_prompts(model_folder: Callable[[str], Path]) -> None:
    """A controller's batches have them; its state, which is plain data, has such episodes begin anew."""
    prompts = mixed_prompts(QWEN)
    sampling = {"n": 2, "max_tokens": 5, "ignore_eos": True}
    with rlcore.InferenceEngine(model_folder(QWEN)).build(devices="cpu") as infer:
        workflow = SingleTurn(lambda data, text: float(data), sampling, prompt=lambda number: prompts[number])
        rollout = RolloutController(infer, workflow, batch_size=2)
        try:
            batch = rollout.rollout_batch([0, 2, 3], timeout_s=60)
            for row, number in enumerate((0, 0, 2, 2, 3, 3)):
                pixels = prompts[number]["pixel_values"] if number != 2 else torch.empty(0, 96)
                assert_same_bits(batch["pixel_values"].part(row), pixels)
            for number in (1, 2):
                rollout.submit(number)
            while rollout.stats.ended < 5:
                time.sleep(0.01)
            state = rollout.state_dict()
        finally:
            rollout.close()
    assert [data for _, data in state["queued"]] == [1] and [data for _, data, _ in state["ready"]] == [2]


# --------------------------------------------------------------------------------------------------- sequence inputs


def test_rows_of_sequences() -> None:
    first, second = torch.arange(6).view(3, 2), torch.arange(6, 8).view(1, 2)
    value = SequenceInput.of([first, None, second, first])
    assert len(value) == 4 and len(value.rows) == 4, "rows that two sequences have are kept once"
    assert [len(value.part(number)) for number in range(4)] == [3, 0, 1, 3]
    assert_same_bits(value[[3, 2]].joined(), torch.cat([first, second]))
    assert_same_bits(value[torch.tensor([False, True, True, False])].joined(), second)
    assert len(value[2:3].compact().rows) == 1
    compact = value[torch.tensor([3, 1, 0])].compact()
    assert len(compact.rows) == 3
    assert_same_bits(compact.joined(), torch.cat([first, first]))


def test_rows_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="needs the rows of one sequence at least"):
        SequenceInput.of([None])
    with pytest.raises(InvalidInputError, match="joins rows of one dtype and shape"):
        SequenceInput.of([torch.zeros(1, 2), torch.zeros(1, 3)])
    with pytest.raises(InvalidInputError, match=r"must be a tensor \[rows, ...\], got 3"):
        SequenceInput.of([3])  # type: ignore[list-item]
