"""Every block of Python in README and docs runs, here or in the test that is named, or the list says why not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from tests.warm import ENGINES, run_warm

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RECORD = ROOT / "bench" / "results" / "startup-cpu.json"

HERE = {
    "README.md": (0, 1, 2),
    "docs/doctor.md": (0,),
    "docs/losses.md": (0,),
    "docs/offload.md": (1,),
    "docs/plugins.md": (0,),
    "docs/weight_sync.md": (3,),
}
"""Page and numbers of its blocks."""

ELSEWHERE = {
    "docs/bench.md": "tests/bench/test_docs.py",
    "docs/collectives.md": "tests/collectives/test_docs_of_collectives.py",
    "docs/devices.md": "tests/devices/test_docs_of_devices.py",
    "docs/integrations.md": "tests/docs/test_integrations.py",
    "docs/kernels.md": "tests/kernels/test_docs_of_kernels.py",
    "docs/plan.md": "tests/planning/test_plan.py",
    "docs/plugins.md": "tests/docs/test_plugins.py",
    **{
        f"docs/guides/{name}.md": "tests/examples/test_examples.py"
        for name in ("framework_author", "hardware_buyer", "researcher")
    },
}
"""All other blocks of a page."""

NOT_RUN = {
    "docs/ascend.md": {0: "needs an NPU", 1: "needs an NPU and vllm-ascend"},
    "docs/clusters.md": {0: "needs Ray; tests/engines/launchers/test_ray_engines.py makes such calls"},
    "docs/engines.md": {
        0: "lines for a program that has four devices; tests/engines/test_train_sharded.py makes such calls",
        1: "the fields of a class, whose methods are left out",
        2: "lines for a program with peft; tests/engines/test_train_lora.py makes such calls",
        3: "a part of a program; tests/engines/test_train_modules.py has all of it",
        4: "lines for a program in training; tests/engines/test_train_checkpoints.py makes such calls",
        5: "lines for another program; tests/engines/test_checkpoint.py reads a checkpoint so",
    },
    "docs/parity.md": {
        0: "lines for a program with vLLM; tests/engines/test_routing_replay.py makes such calls",
        1: "lines for a program with vLLM; tests/engines/sampling/vllm/test_vllm_experts.py makes such calls",
    },
    "docs/sglang.md": {0: "needs SGLang; tests marked sglang make such calls"},
    "docs/images.md": {0: "lines for a program with a processor; tests/engines/test_images.py makes such calls"},
    "docs/parallel.md": {
        0: "lines for a program with eight devices; tests/engines/test_train_sequence_parallel.py makes such calls"
    },
    "docs/offload.md": {
        0: "lines for a program with engines; tests/engines/test_offload_swap.py makes such calls",
        2: "asks for more host memory than a test may take",
    },
    "docs/rollout.md": {
        0: "a function for a program with engines; tests/rollout/test_rollout_engines.py makes such calls",
        1: "a function for a program with engines; tests/rollout/test_lending.py makes such calls",
        2: "a class for a program with engines; tests/rollout/test_rollout_client.py makes such calls",
        3: "functions for a program with engines; tests/rollout/test_rollout_engines.py makes such calls",
    },
    "docs/trace.md": {0: "a function for a program with a sampler; tests/cli/test_cli_trace.py makes such calls"},
    "docs/trl.md": dict.fromkeys(range(2), "a part of a program; tests/integrations/test_trl.py makes such calls"),
    "docs/deepspeed.md": {0: "needs DeepSpeed; tests/engines/test_train_deepspeed.py makes such calls"},
    "docs/vllm.md": dict.fromkeys(range(6), "needs vLLM; tests marked vllm make such calls"),
    "docs/weight_sync.md": {
        0: "lines for a program with engines; tests/engines/weight_sync/test_rounds.py makes such calls",
        1: "lines for a program with engines; tests/engines/weight_sync/test_delta.py makes such calls",
        2: "the lines of two processes; tests/engines/weight_sync/test_standalone.py makes such calls",
        4: "the lines of three processes; tests/engines/weight_sync/test_tcp_control.py makes such calls",
    },
}
"""Page, and the reason for each of its blocks that do not run."""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_every_block_is_run_or_listed_once() -> None:
    written = {(name, number) for name in map(name_of, PAGES) for number in range(len(blocks(name)))}
    listed = [(page, number) for lists in (HERE, NOT_RUN) for page, numbers in lists.items() for number in numbers]
    elsewhere = [block for block in written if block[0] in ELSEWHERE and block not in listed]
    assert sorted(listed + elsewhere) == sorted(written)


def test_every_test_that_is_named_exists() -> None:
    reasons = [reason for page in NOT_RUN.values() for reason in page.values()]
    named = {*ELSEWHERE.values(), *re.findall(r"tests/[\w/]+\.py", " ".join(reasons))}
    assert len(named) > len(set(ELSEWHERE.values()))
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_the_framework_authors_lines_in_the_readme(tmp_path: Path) -> None:
    found = run_warm(blocks("README.md")[0], cwd=tmp_path, env={"RLCORE_DEVICE": "cpu"})
    assert (found.returncode, found.stdout) == (0, "33 MB are free for somebody else\n"), found.stderr


@pytest.mark.slow
def test_the_researchers_lines_in_the_readme(tmp_path: Path) -> None:
    settings = {"RLCORE_CACHE": str(tmp_path), "RLCORE_DEVICE": "cpu"}
    found = run_warm(blocks("README.md")[1], cwd=tmp_path, env=settings, modules=ENGINES)
    assert found.returncode == 0, found.stderr
    metrics, route = found.stdout.splitlines()
    assert "'entropy_mean': " in metrics and route == "local"


def test_the_buyers_lines_in_the_readme(tmp_path: Path) -> None:
    shutil.copy(RECORD, tmp_path / "mine.json")
    found = run_warm(blocks("README.md")[2], cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    machine, *rows = found.stdout.splitlines()
    assert "torch 2." in machine and [row for row in rows if row.startswith("startup/import ")]


def test_the_launch_facts_of_the_page_are_those_told_beside_them() -> None:
    names: dict[str, Any] = {}
    (block,) = blocks("docs/doctor.md")
    exec(block, names)
    told = re.findall(r"^(facts\..*?)  # ([^;\n]+)", block, re.MULTILINE)
    assert len(told) == 4
    assert [(code, eval(code, names)) for code, _ in told] == [(code, eval(value)) for code, value in told]


def test_the_registration_of_a_device_that_torch_knows() -> None:
    spec = eval(blocks("docs/plugins.md")[0], {"DeviceSpec": rlcore.DeviceSpec})
    assert (spec.name, spec.visible_devices_variable) == ("xpu", "ZE_AFFINITY_MASK")


@pytest.mark.slow
def test_the_loss_of_logprobs_on_the_page_gives_gradients() -> None:
    names: dict[str, Any] = {}
    exec(blocks("docs/losses.md")[0], names)
    assert names["logits"].grad.any()


def test_the_offloader_on_the_page() -> None:
    model = torch.nn.Linear(4, 4)
    names: dict[str, Any] = {"rlcore": rlcore, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    *lines, last = blocks("docs/offload.md")[1].splitlines()
    exec("\n".join(lines), names)
    assert eval(last, names) == {"weights": "loaded", "optimizer": "loaded", "grads": "loaded"}


def test_the_sync_in_one_thread_on_the_page() -> None:
    model, engine_model = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    names: dict[str, Any] = {"rlcore": rlcore, "model": model, "engine_model": engine_model}
    exec(blocks("docs/weight_sync.md")[3], names)
    assert torch.equal(engine_model.weight, model.weight) and torch.equal(engine_model.bias, model.bias)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
