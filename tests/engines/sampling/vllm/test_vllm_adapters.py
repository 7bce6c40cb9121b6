"""Adapters alone, version by version: the files are peft's, and real vLLM completes with each as transformers does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlcore.engines.sampling.vllm.adapters import AdapterVersions
from rlcore.errors import CheckpointError, InvalidInputError, UnsupportedError
from tests.accuracy import assert_same_bits

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft reads it
peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'rlcore[hf]'")


def adapted(folder: Path, **options: Any) -> Any:
    """Return the folder's model with LoRA adapters around it, which change what it says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    found = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], **options))
    change(found, 1)
    return found


@torch.no_grad()
def change(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def test_a_version_is_what_peft_loads(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = adapted(model_folder)
    versions = AdapterVersions(model, name="policy")
    ids = torch.tensor([[9, 0, 2, 1]])
    published = []
    for number in (1, 2, 3):
        change(model, number)
        published.append(version := versions.publish())
        assert (version.name, version.number) == (f"policy-{number}", number)
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        read = peft.PeftModel.from_pretrained(base, version.path)
        with torch.no_grad():
            assert_same_bits(read(ids).logits, model(ids).logits, "the version as peft reads it")
    assert [Path(version.path).exists() for version in published] == [False, True, True]
    versions.close()
    assert not Path(published[-1].path).parent.exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"adapters cannot be written to .*/file/rlcore-1: "):
        AdapterVersions(model, folder=tmp_path / "file").publish()


def test_what_vllm_would_not_get_is_refused(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(InvalidInputError, match="takes a model with adapters of peft; Qwen2ForCausalLM has none"):
        AdapterVersions(plain)
    model = adapted(model_folder)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    said = "sending adapters alone while model.norm.weight is trained too is not supported: vLLM would keep its first"
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        AdapterVersions(model)
    other = peft.get_peft_model(plain, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(UnsupportedError, match="sending adapters of the kind IA3 is not supported: vLLM knows LoRA's"):
        AdapterVersions(other)
    two = adapted(model_folder)
    two.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    two.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnsupportedError, match=re.escape("sending adapters ['default', 'second'] at once")):
        AdapterVersions(two)


@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_vllm_completes_with_each_version_what_transformers_does(_quick: None, model_folder: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from .stock import PROMPTS, greedy

    llm = LLM(
        str(model_folder), enable_lora=True, max_loras=2, max_lora_rank=8, skip_tokenizer_init=True, dtype="float32",
        enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 24, gpu_memory_utilization=0.01,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def completed(request: Any) -> list[list[int]]:
        prompts: Any = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(prompts, params, lora_request=request, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]

    model = adapted(model_folder)
    versions = AdapterVersions(model)
    said: list[Any] = []
    first: Any = None
    for number in (1, 2):
        change(model, number)
        version = versions.publish()
        said.append(greedy(model))
        assert completed(version.request()) == said[-1]
        by_position = LoRARequest(*version)
        assert (by_position.lora_name, by_position.lora_int_id, by_position.lora_path) == tuple(version)
        first = first or version.request()
        assert completed(first) == said[0]
    assert len({str(one) for one in said}) == 2
    with model.disable_adapter():
        assert completed(None) == greedy(model)
    versions.close()
