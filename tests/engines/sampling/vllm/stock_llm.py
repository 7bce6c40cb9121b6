"""A vLLM user's own program, which has rlcore installed and says so in one argument; driven by lines of stdin.

Each line is a list of methods of ``LLM`` to call, with their arguments; "answer" stands for greedy completions. Each
answer is a line of JSON: the tokens, where they were asked for, or the error of the first call that failed.
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
    say(found={"tokens": greedy(llm)})
    for line in sys.stdin:
        found: dict[str, Any] = {}
        try:
            for method, *arguments in json.loads(line):
                if method == "answer":
                    found["tokens"] = greedy(llm)
                else:
                    getattr(llm, method)(*arguments)
        except Exception as error:  # the test sees it
            found = {"error": str(error)}
        say(found)


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": [9, 0, 2, 1]}, {"prompt_token_ids": [3]}]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def say(found: dict[str, Any]) -> None:
    print("ANSWER", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
