"""A small Qwen2.5-VL learns to count the red squares of an image: images from the prompt to the gradient.

The model is made here, with random weights, and so are the images: a few fields, each empty, blue or red. A right
answer earns 1, a near one less. The score is the share of right greedy answers to images that are not trained on.

Letters: P prompts, n answers to each.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoImageProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import group_advantage, ppo_clip
from rlcore.quickstart.host_threads import host_threads

TOKENS = [*"0123456789", "?", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QUESTION, START, END, IMAGE, VIDEO = (
    TOKENS.index(one) for one in ("?", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
)
FIELD = 8
"""Pixels of a field's side, which the model sees as one token."""
COLOURS = torch.tensor([[255, 255, 255], [40, 60, 220], [220, 40, 40]], dtype=torch.uint8)
RED = 2


class Policy(HuggingFaceTrainModule, Qwen2_5_VLForConditionalGeneration):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)


def write_model(folder: Path, seed: int) -> None:
    """Write a model folder with random weights, and the processor of its images."""
    text = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": TOKENS.index("<|im_end|>"),
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 1,
        "patch_size": FIELD // 2,
        "window_size": FIELD,
        "fullatt_block_indexes": [0],
        "out_hidden_size": 64,
        "initializer_range": 0.08,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": FIELD // 2,
        "min_pixels": FIELD**2,
        "max_pixels": (8 * FIELD) ** 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single characters: vLLM does not read images without one."""
    words = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens([token for token in TOKENS if len(token) > 1])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Squares:
    """Images with red squares, and prompts of them."""

    def __init__(self, folder: Path, side: int, seed: int) -> None:
        self._processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        self._side = side
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> tuple[list[dict[str, Any]], Tensor]:
        """Return prompts, and the number of red squares in the image of each [P]."""
        red = torch.randint(self._side**2 + 1, (count,), generator=self._random)
        return [self._prompt(number) for number in red.tolist()], red

    def _prompt(self, red: int) -> dict[str, Any]:
        count = self._side**2
        fields = torch.randint(RED, (count,), generator=self._random)
        fields[torch.randperm(count, generator=self._random)[:red]] = RED
        pixels = COLOURS[fields.view(self._side, self._side)]
        image = pixels.repeat_interleave(FIELD, 0).repeat_interleave(FIELD, 1).numpy()
        inputs = self._processor(images=[image], return_tensors="pt")
        return {"prompt_token_ids": [START, *[IMAGE] * count, END, QUESTION], **inputs}


def rewards(outputs: list[Any], red: Tensor) -> Tensor:
    """Return 1 for a right answer, half as much for each square that it is off, 0 for what is no number; [P, n]."""
    answer = torch.tensor([[one.token_ids[0] for one in output.outputs] for output in outputs])
    return torch.where(answer < 10, 0.5 ** (answer - red[:, None]).abs(), 0.0)


def score(infer: rlcore.InferenceEngine, held_out: tuple[list[dict[str, Any]], Tensor]) -> float:
    prompts, red = held_out
    outputs = infer.generate(prompts, {"temperature": 0.0, "max_tokens": 1}, progress=False)
    answers = torch.tensor([output.outputs[0].token_ids[0] for output in outputs])
    return float((answers == red).float().mean())


@host_threads(1)  # the model is small: more threads of the host would wait for each other
def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Train; print, and return, the held-out score before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, number in {"side": 2, "steps": 60, "prompts": 32, "samples": 8, "held-out": 256, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--trainer", default="fsdp2", help="train executor")
    parser.add_argument("--sampler", default="hf", help="inference executor")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, options.seed)
        with rlcore.meta_device():
            module = Policy.from_pretrained(folder)
        squares = Squares(folder, options.side, options.seed)
        held_out = squares.draw(options.held_out)
        # vLLM plans memory for all that the model could read, videos too, and takes 4 GiB of a host for its cache
        limits: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "kv_cache_memory_bytes": 1 << 26}
        if options.sampler != "vllm":
            limits = {}
        with (
            rlcore.InferenceEngine(folder, executor=options.sampler).build(dtype="float32", **limits) as infer,
            rlcore.TrainEngine(module, executor=options.trainer).build(colocate_with=infer) as train,
        ):
            before = score(infer, held_out)
            print(f"score {before:.3f} at the beginning", flush=True)
            for step in range(1, options.steps + 1):
                prompts, red = squares.draw(options.prompts)
                outputs = infer.generate(prompts, {"n": options.samples, "max_tokens": 1, "seed": step}, progress=False)
                reward = rewards(outputs, red)
                batch = rlcore.collate(outputs, advantages=group_advantage(reward))
                train.train_batch(batch, ppo_clip(clip_high=0.2))
                train.sync_weights(infer)
                if step % 10 == 0:
                    print(f"step {step:3}  reward {reward.mean():.3f}", flush=True)
            after = score(infer, held_out)
            print(f"score {after:.3f} after {options.steps} steps", flush=True)
    return before, after


if __name__ == "__main__":
    main()
