"""A real vLLM samples from prompts with images, and is given the weights of all parts of the model by a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import rlcore
from rlcore.errors import InvalidInputError
from rlcore.ops import ppo_clip
from tests.engines.image_agreement import check_logprobs, mixed_prompts, module_of
from tests.engines.image_models import CONFIGS, VOCAB, prompt_of, write_model

from .conftest import DEVICE, SHAPE

pytestmark = pytest.mark.vllm
LLAVA = "llava"
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", LLAVA: "LlavaProcessor"}
SAMPLING = {"n": 2, "max_tokens": 6, "seed": 3, "ignore_eos": True}

_NAMED = {20: "<image>", 21: "<|video_pad|>", 22: "<|vision_start|>", 23: "<|vision_end|>"}
_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "min_pixels": 64, "max_pixels": 1024}
"""The settings of a processor by which vLLM finds out, when it starts, how large images can be."""
_LLAVAS_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 8},
    "crop_size": {"height": 8, "width": 8},
}
_LLAVAS_TOKENS = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _config(family: str) -> Any:
    """Return the family's small model with heads that vLLM's build for the CPU has a kernel for."""
    config = CONFIGS[family][1]()
    for name, value in {**SHAPE, "head_dim": 32}.items():
        setattr(config.text_config, name, value)
    if family != LLAVA:
        config.text_config.rope_parameters["mrope_section"] = [6, 5, 5]
        config.vision_config.out_hidden_size = SHAPE["hidden_size"]
    return config


def _name_as_on_the_hub(folder: Path) -> None:
    """Give LLaVA's vision tower the names of published checkpoints, which newer transformers shorten as it saves."""
    file = folder / "model.safetensors"
    stored = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in load_file(file).items()}
    save_file(stored, file, {"format": "pt"})


@pytest.fixture(scope="module", params=list(PROCESSORS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp(family), family, config=_config(family))
    kind = {"processor_class": PROCESSORS[family]}
    images = _LLAVAS_IMAGES if family == LLAVA else _IMAGES
    (folder / "preprocessor_config.json").write_text(json.dumps(images | kind))
    if family == LLAVA:
        _name_as_on_the_hub(folder)
        (folder / "processor_config.json").write_text(json.dumps(_LLAVAS_TOKENS | kind))
    words = {_NAMED.get(number, f"{number}"): number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(list(_NAMED.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"image_token": _NAMED[20], "video_token": _NAMED[21], "eos_token": "14", "pad_token": "14"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def reader(
    family: str, folder: Path, build_vllm: Callable[..., rlcore.InferenceEngine]
) -> Iterator[rlcore.InferenceEngine]:
    with build_vllm(folder, limit_mm_per_prompt={"image": 2, "video": 0}) as engine:
        yield engine


def test_sampler_trainer_and_transformers_agree(family: str, reader: rlcore.InferenceEngine) -> None:
    """They do before and after a step, whose weights are synced: vision tower, projector and decoder."""
    prompts = mixed_prompts(family)
    with rlcore.TrainEngine(module_of(family, reader.path)).build(devices=DEVICE) as train:
        for _ in range(2):
            outputs = reader.generate(prompts, SAMPLING, progress=False)
            batch = rlcore.collate(outputs, advantages=torch.linspace(-1, 1, 8))
            check_logprobs(family, reader.path, outputs, batch, train, device=DEVICE)
            train.train_batch(batch, ppo_clip(), max_tokens_per_micro_batch=48)
            assert train.sync_weights(reader, verify=True).fallback_bytes == 0


def test_each_prompt_has_the_images_that_came_with_it(family: str, reader: rlcore.InferenceEngine) -> None:
    """Equal tokens with other pixels have another answer, also after the first have been computed and kept."""
    first = prompt_of(family, seed=1)
    other = first | {"pixel_values": -first["pixel_values"]}
    found = reader.generate([first, other, dict(first)], SAMPLING | {"max_tokens": 1}, progress=False)
    logprobs = [[(one.token_ids, one.logprobs) for one in output.outputs] for output in found]
    assert logprobs[0] == logprobs[2] != logprobs[1]


def test_images_that_do_not_fit_are_refused_before_anything_is_sampled(
    family: str, reader: rlcore.InferenceEngine
) -> None:
    good, bad = prompt_of(family), prompt_of(family) | {"input_ids": torch.tensor([[1, 2]])}
    for ask in (reader.generate, reader.submit):
        with pytest.raises(InvalidInputError, match="prompt 1 has 1 images and no run of tokens for image 0"):
            ask([good, bad], SAMPLING)
    assert not reader.collect(timeout_s=0.0)
    assert len(reader.generate([good], SAMPLING, progress=False)[0].outputs) == 2
