"""The model on which executors are tested: a folder, weights that differ in every tensor, and a module that trains.

Executors are given folders that transformers writes; nothing but a tiny random model is made here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.nn import HuggingFaceTrainModule

_CHARACTERS = "0123456789+-*/=<>()[]{}, .:abcdefghijkl$"
"""One token each; the last ends a text."""
_CONFIG = {
    "vocab_size": len(_CHARACTERS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32: kernels of attention want heads of some size
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,  # peaked distributions, whose log-probs differ much with the temperature
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": len(_CHARACTERS) - 1,
    "pad_token_id": None,
    "dtype": "float32",
}


def write_tiny_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a Qwen2 of 40 tokens and 128 positions in float32, with a tokenizer of single characters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**_CONFIG | changes))
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: token for token, character in enumerate(_CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["$"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "$"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def damaged_copy(folder: Path, path: Path) -> Path:
    """Copy a model folder to ``path``, with a file of weights that ends too early."""
    shutil.copytree(folder, path)
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    return path


def changed(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return weights of which every tensor differs so much that a sampler without it gives other log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def one(tensor: Tensor) -> Tensor:
        size = float(tensor.double().square().mean().sqrt()) or 1.0
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return (tensor.double() + 0.4 * size * noise).to(tensor.dtype)

    return {name: one(tensor) for name, tensor in weights.items()}


def policy(folder: Path) -> Any:
    """Return a module of the folder's model for a train engine, with methods for tests; on meta under meta_device()."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    base: Any = getattr(transformers, config.architectures[0])

    class Policy(HuggingFaceTrainModule, base):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.forget_steps()

        def forget_steps(self) -> None:
            """Begin with a new optimizer, with so large an eps that the sign of a tiny gradient moves no weight."""
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

        def total(self, numbers: list[int], offset: int = 0) -> int:
            return sum(numbers) + offset

        def fail(self) -> None:
            raise KeyError("planted by the suite")

    return Policy.from_pretrained(folder)
