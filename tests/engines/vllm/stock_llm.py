"""A vLLM user's own program, which has rlcore installed and says so in one argument; driven by lines of stdin.

Each line is a weight update; each answer is a line of JSON with the tokens of greedy completions, and an error if any.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams


def main(folder: str, address: str, size: int) -> None:
    llm = LLM(
        folder,
        weight_transfer_config={"backend": "rlcore_ipc"},
        tensor_parallel_size=size,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 24,
        gpu_memory_utilization=0.01,
    )
    answer(llm, {})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["connects"]:
                llm.init_weight_transfer_engine({"init_info": {"address": address, "timeout_s": request["timeout_s"]}})
            llm.start_weight_update()
            llm.update_weights({"update_info": {"timeout_s": request["timeout_s"]}})
            llm.finish_weight_update()
            llm.reset_prefix_cache()
            answer(llm, {})
        except Exception as error:  # the test sees it
            answer(llm, {"error": str(error)})


def answer(llm: LLM, found: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": [9, 0, 2, 1]}, {"prompt_token_ids": [3]}]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print("ANSWER", json.dumps(found | {"tokens": [list(one.outputs[0].token_ids) for one in outputs]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
