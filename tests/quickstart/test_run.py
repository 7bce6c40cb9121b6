"""``rlcore quickstart`` as a user runs it: real runs, real signals, real full disks.

Most runs here are made small by ``SMALL``: few problems, an unfinished warm-start, and a verifier that is content with
an even first digit, so that there is something to learn from the first step on. The slow tests run the real thing.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.cli import main as cli
from rlcore.errors import CheckpointError
from rlcore.quickstart import run, task
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.model import quickstart_model
from tests.accuracy import AS_ACCURATE
from tests.model_rounding import logprob_rounding
from tests.quickstart import learnt_run
from tests.warm import ENGINES, kill, warm

SMALL = """
import sys
from rlcore.quickstart import run, task
run.ASKED, run.PROMPTS, run.SAMPLES, run.EVERY = 12, 8, 4, 2
run.GATE_ACCURACY, run.MAX_IMITATION_STEPS, run.IMITATION_BATCH, run.WARM_UP = 2.0, 12, 32, 1  # all 12 steps are made
task.reward = lambda problem, text: float(text[:1] in tuple("02468"))
from rlcore.cli.main import main
main()
"""
INTERRUPTED = """
import itertools, os, signal
from rlcore.quickstart import run, task
def call(*arguments, original={function}, number=itertools.count(1)):
    if next(number) == {call}:
        os.kill(os.getpid(), signal.SIGINT)
    return original(*arguments)
{function} = call
"""
WITHOUT_SYNC = """
import rlcore
from rlcore.errors import SyncError
def refuse(*arguments):
    raise SyncError("the sampler is gone")
rlcore.TrainEngine.sync_weights = refuse
"""
STEPS = 8
TIMINGS = re.compile(r"_s$")  # seconds of each phase, and tokens_per_s

Start = Callable[..., "subprocess.Popen[str]"]

pytestmark = pytest.mark.timeout(900)  # some tests have several runs


MOST_TOKENS = 32
"""More than a problem and its answer have."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rlcore's cache folder with the quickstart's model in it; matplotlib's, of whose making stderr tells, is there."""
    importlib.import_module("matplotlib.font_manager")
    folder = tmp_path_factory.mktemp("cache")
    quickstart_model(seed=0, cache=folder)
    return folder


@pytest.fixture(scope="session")
def start(cache: Path) -> Iterator[Start]:
    """Start ``rlcore quickstart`` with arguments; ended at the latest with the tests."""
    started = []

    def start(*arguments: str | Path, code: str | None = SMALL, **env: str) -> subprocess.Popen[str]:
        program = ["-m", "rlcore"] if code is None else ["-c", code]
        process = subprocess.Popen(
            [*warm(*ENGINES), *program, "quickstart", *map(str, arguments)],
            # one thread: sums are taken in one order, and nothing waits when other tests have the cores
            env=os.environ | {"RLCORE_CACHE": str(cache), "OMP_NUM_THREADS": "1"} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=800)
    return process.returncode, stdout, stderr


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"{text!r} was not among {seen}")


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not is_so():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def metrics(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def curve(folder: Path) -> list[dict[str, float]]:
    """Everything of metrics.jsonl that does not depend on the clock."""
    return [{name: v for name, v in step.items() if not TIMINGS.search(name)} for step in metrics(folder)]


def progress(folder: Path) -> dict[str, int]:
    """The steps done that the checkpoint remembers."""
    manifest = json.loads((folder / "checkpoint" / "manifest.json").read_bytes())
    found: dict[str, int] = manifest["state"]["extra"]
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(process: subprocess.Popen[str]) -> str:
    """The one line on stderr of a run that was refused."""
    code, stdout, stderr = ended(process)
    assert (code, stdout) == (1, ""), stderr
    assert re.fullmatch("rlcore: .*\n", stderr), stderr
    return stderr.removeprefix("rlcore: ").removesuffix("\n")


@pytest.fixture(scope="session")
def finished(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder, stdout and stderr of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed run"
    code, stdout, stderr = ended(start("--steps", str(STEPS), "--output", folder))
    assert code == 0, stderr
    return folder, stdout, stderr


# ---------------------------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_a_picture_metrics_a_checkpoint_and_a_model(finished: tuple[Path, str, str]) -> None:
    folder = finished[0]
    assert {file.name for file in folder.iterdir()} == {
        "run.json",
        "metrics.jsonl",
        "reward.png",
        "checkpoint",
        "model",
    }
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert progress(folder) == {"imitation": 12, "step": STEPS}


def test_every_step_has_its_line_of_metrics(finished: tuple[Path, str, str]) -> None:
    first, *steps = metrics(finished[0])
    assert first.keys() == {"step", "imitation_steps", "accuracy"}
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert 0 <= line["reward"] <= 1
        assert all(line[f"{phase}_s"] > 0 for phase in ("generate", "train", "sync", "offload"))
        assert line["tokens_per_s"] > 0
        assert ("accuracy" in line) == (line["step"] % 2 == 0)
    assert len({line["reward"] for line in steps}) > 2, "nothing varies: the runs here show nothing"
    assert all(line["grad_norm"] > 0 for line in steps)


def test_the_samplers_logprobs_are_the_trainers_in_every_step(finished: tuple[Path, str, str]) -> None:
    folder, _, stderr = finished
    parity = [line["parity"] for line in metrics(folder)[1:]]
    assert 0 < max(parity) < logprob_rounding(folder / "model", MOST_TOKENS)
    assert f"parity {parity[-1]:.0e}" in stderr


@pytest.mark.ray
@pytest.mark.slow
def test_workers_of_a_ray_cluster_have_the_same_curve(
    start: Start, finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    code, _, stderr = ended(start("--steps", str(STEPS), "--launcher", "ray", "--output", tmp_path / "run"))
    assert code == 0, stderr
    assert curve(tmp_path / "run") == curve(finished[0])


def test_stdout_is_the_table_and_nothing_has_escape_codes(finished: tuple[Path, str, str]) -> None:
    folder, stdout, stderr = finished
    assert [line.split("  ")[0] for line in stdout.splitlines()] == [
        "rlcore quickstart",
        "held-out accuracy, greedy",
        "sampler against trainer",
        "seconds",
        "picture",
        "metrics",
        "checkpoint",
        "model",
    ]
    assert f"{folder}/reward.png" in stdout
    assert re.fullmatch(
        r"warm-start step 0  sampled accuracy .*\nstep 0/8  .*\nstep 8/8  reward .*  parity .* tokens/s  .*\n", stderr
    )
    assert "\x1b" not in stdout + stderr and "\r" not in stdout + stderr


def test_the_model_answers_in_transformers_as_in_the_engine(finished: tuple[Path, str, str]) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    import rlcore

    folder = finished[0] / "model"
    drawn = random.Random(0)  # problems alone are all answered alike, as these runs are rewarded for it
    prompts = ["".join(drawn.choices("0123456789+-*/=()", k=6)) for _ in range(64)]
    with rlcore.InferenceEngine(folder).build(devices="cpu") as engine:
        outputs = engine.generate(prompts, {"temperature": 0.0, "max_tokens": 4}, progress=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__name__ == "Qwen2ForCausalLM"
    inputs = tokenizer(prompts, return_tensors="pt")  # prompts of one length: no padding
    with torch.no_grad():
        generated = model.generate(**inputs, do_sample=False, max_new_tokens=4)
    theirs = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [output.outputs[0].text for output in outputs] == theirs
    assert len(set(theirs)) > 1


# --------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.slow
def test_ctrl_c_in_the_warm_start_and_again_in_grpo_changes_nothing(
    start: Start, finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    options = ["--steps", str(STEPS), "--output", folder]
    in_imitation = INTERRUPTED.format(function="task.imitation_batch", call=5)
    code, stdout, stderr = ended(start(*options, code=in_imitation + SMALL))
    _, said, hint = stderr.splitlines()
    assert (code, stdout, said) == (130, "", "stopping after this step; press Ctrl-C again to stop at once")
    assert re.fullmatch(r"stopped; continue with: .* quickstart --resume --output '.*/a run'", hint)
    assert progress(folder) == {"imitation": 5, "step": -1}

    in_grpo = INTERRUPTED.format(function="task.draw", call=7 + 3)  # 7 more batches to imitate, then a draw a step
    code, stdout, stderr = ended(start("--resume", "--output", folder, code=in_grpo + SMALL))
    assert (code, stdout) == (130, "")
    assert stderr.startswith("resumed after 5 imitation steps, 0 steps\n")
    assert progress(folder) == {"imitation": 12, "step": 3}  # no checkpoint is due then
    assert len(metrics(folder)) == 4

    code, stdout, stderr = ended(start("--resume", "--steps", str(STEPS), "--output", folder))
    assert code == 0, stderr
    assert curve(folder) == curve(finished[0])


@pytest.mark.slow
def test_the_command_that_is_printed_resumes_the_run(start: Start, cache: Path, tmp_path: Path) -> None:
    process = start("--output", tmp_path / "it's", "--seed", "0", "--steps", "9", "--device", "cpu", code=None)
    read_until(process, "warm-start step 0")
    process.send_signal(signal.SIGINT)
    code, _, stderr = ended(process)
    assert code == 130
    command = stderr.splitlines()[-1].partition("continue with: ")[2]
    shell = ["bash", "-c", f"exec {command}"]
    environment = os.environ | {"RLCORE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(shell, stderr=subprocess.PIPE, text=True, env=environment) as resumed:
        read_until(resumed, "resumed after")
        resumed.kill()
    assert json.loads((tmp_path / "it's" / "run.json").read_bytes())["steps"] == 9


@pytest.mark.slow
def test_a_run_killed_at_random_moments_goes_on_as_if_it_never_was(
    start: Start, finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    seed = time.time_ns()
    print(f"moments drawn with seed {seed}")  # shown if the test fails
    moment = random.Random(seed)
    process = start("--steps", str(STEPS), "--output", tmp_path / "run")
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    for _ in range(2):
        time.sleep(moment.uniform(0, 6))
        kill(process)
        process.communicate()
        process = start("--resume", "--steps", str(STEPS), "--output", tmp_path / "run")
    code, _, stderr = ended(process)
    assert code == 0, stderr
    assert curve(tmp_path / "run") == curve(finished[0])


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_stops_at_once(start: Start, tmp_path: Path) -> None:
    """To build an engine may take a minute, and there is nothing to save."""
    interrupted = INTERRUPTED.format(function="run.Quickstart.build_sampler", call=1) + SMALL
    process = start("--output", tmp_path / "run", code=f"print('said before')\n{interrupted}", PYTHONUNBUFFERED="")
    assert ended(process) == (130, "said before\n", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_called_by_a_program_leaves_an_interruption_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(config: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlcore.quickstart.run.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli.quickstart(output=tmp_path / "run")


@pytest.mark.slow
def test_ctrl_c_twice_stops_at_once_without_noise(start: Start, tmp_path: Path) -> None:
    process = start("--steps", "10000", "--output", tmp_path / "run")
    read_until(process, "step 10/")
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping after this step")
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = ended(process)
    assert (code, stdout) == (130, "")
    # the step may have ended between the two: then the run has stopped by the first
    told = "stopped(?: at once; continue from the last checkpoint|; continue with)"
    assert re.fullmatch(rf"{told}: .* quickstart --resume --output .*\n", stderr), stderr


@pytest.mark.slow
def test_ctrl_c_twice_in_the_warm_start_says_that_nothing_is_kept(start: Start, tmp_path: Path) -> None:
    twice = (INTERRUPTED.format(function=name, call=1) for name in ("task.answer_batch", "task.imitation_batch"))
    code, stdout, stderr = ended(start("--output", tmp_path / "run", code="".join(twice) + SMALL))
    assert (code, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "stopped at once, before the first checkpoint: nothing is kept"


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("--output", folder, code=None)  # whose warm-start is long
    read_until(process, "warm-start step 0")
    kill(process)
    process.communicate()
    assert not (folder / "checkpoint").exists()
    code, _, stderr = ended(start("--steps", "1", "--output", folder, "--resume"))
    assert code == 0, stderr
    assert stderr.splitlines()[0] == "the run ended before its first checkpoint: starting from the beginning"


@pytest.mark.slow
def test_resuming_a_finished_run_shows_its_table_again_or_goes_on_for_longer(
    start: Start, finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder, table, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    code, stdout, stderr = ended(start("--resume", "--steps", str(STEPS), "--output", copy))
    assert (code, stderr) == (0, f"resumed after 12 imitation steps, {STEPS} steps\n")
    assert stdout == table.replace(str(folder), str(copy))
    assert curve(copy) == curve(folder)
    code, _, stderr = ended(start("--resume", "--steps", str(STEPS + 1), "--output", copy))
    assert code == 0, stderr
    assert [line["step"] for line in metrics(copy)] == list(range(STEPS + 2))


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
def test_a_folder_with_another_run_is_refused_and_left_alone(start: Start, finished: tuple[Path, str, str]) -> None:
    folder = finished[0]
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert refusal(start("--output", folder)) == (
        f"{folder} holds another run (its own model, seed 0, {STEPS} of {STEPS} steps done); "
        "add --resume to continue it, or use another --output"
    )
    assert refusal(start("--output", folder, "--resume", "--seed", "1")) == (
        f"cannot resume {folder}: it holds a run with seed 0, not 1; "
        "give the same options, or another --output without --resume"
    )
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


@pytest.mark.slow
def test_resume_refuses_the_checkpoint_of_another_model(
    start: Start, finished: tuple[Path, str, str], llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    record = json.loads((folder / "run.json").read_bytes())
    (folder / "run.json").write_text(json.dumps(record | {"model": str(llama)}))
    line = refusal(start("--output", folder, "--resume", "--model", llama))
    assert line.startswith("the checkpoint is of another model than QuickstartPolicy: missing: lm_head.weight")


@pytest.mark.slow
def test_resume_refuses_a_damaged_checkpoint_and_leaves_it(
    start: Start, finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (file,) = folder.glob("checkpoint/data-*/optimizer-0.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    before = contents(folder)
    line = refusal(start("--output", folder, "--resume", "--steps", str(STEPS + 1)))
    assert line.startswith(f"the checkpoint {folder}/checkpoint is damaged: {file}: the data of ")
    assert contents(folder) == before


@pytest.mark.slow
def test_a_resume_whose_sampler_takes_no_weights_changes_nothing(
    start: Start, finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    before = contents(folder)
    line = refusal(start("--output", folder, "--resume", "--steps", str(STEPS + 1), code=WITHOUT_SYNC + SMALL))
    assert line == "the sampler is gone"
    assert contents(folder) == before


@pytest.mark.slow
def test_a_refused_model_leaves_the_output_folder_free(start: Start, llama: Path, tmp_path: Path) -> None:
    line = refusal(start("--output", tmp_path / "run", "--model", tmp_path / "typo"))
    assert line.startswith(f"model path '{tmp_path / 'typo'}' is not a folder; rlcore does not download models")
    assert not (tmp_path / "run").exists()
    code, _, stderr = ended(start("--output", tmp_path / "run", "--model", llama, "--steps", "1"))
    assert code == 0, stderr


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_truncated_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)


def with_smaller_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def without_end_of_sequence(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def with_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return damage


def of_unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "hal9000"}))


def of_an_image_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_weights, "{folder} has no weights: neither model.safetensors nor model.safetensors.index.json;"),
        (with_truncated_weights, "{folder}/model.safetensors is damaged: its header needs 3168656 bytes, it has"),
        (with_smaller_vocabulary, "the tokenizer in {folder} has 21 tokens but the model's vocab_size is 20; use the"),
        (without_tokenizer, "{folder} has no tokenizer, which the quickstart needs to write its problems; put the"),
        (without_end_of_sequence, "the tokenizer '{folder}' has no end-of-sequence token, which ends an answer; set"),
        (of_unknown_type, "transformers cannot read {folder}/config.json: ValueError: The checkpoint you are trying"),
        (with_config(hidden_size=-8), "QuickstartPolicy cannot be made of {folder}: RuntimeError: Trying to create"),
        (with_config(hidden_act="foo"), "QuickstartPolicy cannot be made of {folder}: KeyError: 'foo'; see to its"),
        (with_config(hidden_size="128"), "transformers cannot read {folder}/config.json: StrictDataclassFieldValid"),
        (with_config(num_hidden_layers=4), "transformers cannot read {folder}/config.json: StrictDataclassClassVal"),
        (with_config(dtype="float33"), "transformers cannot read {folder}/config.json: AttributeError: module 'torch"),
        (with_config(vocab_size=10**9), "{folder}/config.json has a vocab_size of 1000000000, and no weight there has"),
        (with_config(text_config=4), "text_config in {folder}/config.json must be a JSON object, got 4"),
        (of_an_image_model, "{folder} holds a 'vit' model, which is not a causal language model; use one that is"),
    ],
)
def test_a_model_folder_that_will_not_do_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], message: str
) -> None:
    from rlcore.errors import RlcoreError

    folder = tmp_path / "model"
    shutil.copytree(quickstart_model(seed=0, cache=cache), folder)
    damage(folder)
    with pytest.raises(RlcoreError, match=f"^{re.escape(message.format(folder=folder))}"):
        run.run(QuickstartConfig(model=folder, output=tmp_path / "run"))


@pytest.mark.slow
def test_an_unknown_device_is_refused_with_the_known_ones(start: Start, tmp_path: Path) -> None:
    options = ["--output", tmp_path / "run"]
    line = refusal(start(*options, "--device", "abacus", code=None))
    assert line == "no device 'abacus'; registered: cpu, cuda, npu. See `rlcore devices`."
    line = refusal(start(*options, code=None, RLCORE_DEVICE="abacus"))
    assert line == "RLCORE_DEVICE=abacus: no device 'abacus'; registered: cpu, cuda, npu. See `rlcore devices`."


# ---------------------------------------------------------------------------------------------- foreign model


@pytest.fixture(scope="session")
def llama(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, head not tied, with more token ids than its tokenizer knows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "llama"
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=20,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in quickstart_model(seed=0, cache=cache).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.slow
def test_a_foreign_model_is_trained(start: Start, llama: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    code, stdout, stderr = ended(start("--model", llama, "--steps", "2", "--output", tmp_path / "run"))
    assert code == 0, stderr
    assert len(stderr.splitlines()) == 3, stderr  # transformers says nothing of its own
    parity = logprob_rounding(tmp_path / "run" / "model", MOST_TOKENS)
    assert max(line["parity"] for line in metrics(tmp_path / "run")[1:]) < parity
    assert "after 2 steps" in stdout
    trained = tmp_path / "run" / "model"
    assert AutoConfig.from_pretrained(trained).architectures == ["LlamaForCausalLM"]
    assert (trained / "model.safetensors").read_bytes() != (llama / "model.safetensors").read_bytes()


# -------------------------------------------------------------------------------------------------- full disk


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_loses_no_checkpoint(
    start: Start, finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = ["--steps", str(STEPS), "--output", folder]
    # The first checkpoint, whose optimizer is still empty, fits; the next one, of 6.3 MB of moments, does not.
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, {resource.RLIM_INFINITY}))\n{SMALL}"
    code, stdout, stderr = ended(start(*options, code=limited))
    assert (code, stdout) == (1, "")
    lines = [line for line in stderr.splitlines() if not line.startswith(("warm-start step", "step "))]
    assert len(lines) == 1, stderr
    line = lines[0]
    assert line.startswith(f"rlcore: cannot write the checkpoint {folder}/checkpoint: "), line
    assert line.endswith(f"the previous checkpoint in {folder}/checkpoint is intact")
    assert progress(folder) == {"imitation": 12, "step": 0}
    assert len(list((folder / "checkpoint").iterdir())) == 2  # its data and its manifest: nothing half-written is left
    code, _, stderr = ended(start(*options, "--resume"))
    assert code == 0, stderr
    assert curve(folder) == curve(finished[0])


@pytest.mark.parametrize(
    ("shares", "taught"),
    [
        ([0, 4, 1, 3, 2, 0], [2, 3, 4]),
        ([1] * 10, list(range(8))),  # more than a step takes
        ([0, 4] * 6, list(range(8))),  # none has both
    ],
)
def test_a_step_learns_from_problems_with_right_and_wrong_answers(
    shares: list[int], taught: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PROMPTS", 8)
    rewards = torch.tensor([[1.0] * right + [0.0] * (4 - right) for right in shares])
    assert run.instructive(rewards) == taught


# ---------------------------------------------------------------------------------------- warm-start, threads


def test_the_warm_start_is_measured_by_probabilities(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("RLCORE_CACHE", str(cache))
    config = QuickstartConfig(device="cpu", output=tmp_path)
    nothing: Any = None
    quickstart = run.Quickstart(config, nothing, nothing, nothing)
    asked = quickstart.gate[:24]
    with quickstart.train:
        quickstart.train.build(devices="cpu")
        found = quickstart.sampled_accuracy(asked)
    path = quickstart_model(seed=0, cache=cache)
    model, tokenizer = (one.from_pretrained(path) for one in (AutoModelForCausalLM, AutoTokenizer))

    def probabilities(model: Any) -> torch.Tensor:
        """Return the probability of each right answer, [24]; each is asked by itself."""
        found = []
        for problem in asked:
            prompt = task.prompt_tokens(problem, tokenizer)
            answer = task.answer_tokens(task.answer_text(problem), tokenizer)
            logprobs = model(torch.tensor([prompt + answer])).logits[0].detach().log_softmax(-1)
            found.append(logprobs[range(len(prompt) - 1, len(prompt) + len(answer) - 1), answer].sum().exp())
        return torch.stack(found)

    plain, exact = probabilities(model), probabilities(model.double())
    assert abs(found - float(exact.mean())) <= AS_ACCURATE * float((plain - exact).abs().mean())


@pytest.mark.parametrize(
    ("options", "threads"),
    [({}, 1), ({"threads": 3}, 3), ({"model": Path("m")}, 2), ({"model": Path("m"), "threads": 1}, 1)],
)
def test_a_small_model_has_one_thread_unless_more_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], threads: int
) -> None:
    seen = []

    def refuse(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise CheckpointError("that will do")

    monkeypatch.setattr(run, "Quickstart", refuse)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(CheckpointError, match="that will do"):
            run.run(QuickstartConfig(output=tmp_path / "run", **options))
        assert (seen, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_it_learns_from_rewards_and_from_nothing_else(
    start: Start, made_once: Callable[..., Path], tmp_path: Path
) -> None:
    """The control begins as the run that learns began GRPO, and has as many steps as that needs to learn most."""
    folder = made_once("learnt_run", learnt_run.learn)
    options = ["--model", folder / "start", "--shuffle-rewards", "--steps", "20", "--output", tmp_path / "run"]
    code, _, stderr = ended(start(*options, code=None))
    assert code == 0, stderr
    learns, control = metrics(folder / "run"), metrics(tmp_path / "run")
    before = learns[0]["accuracy"]
    assert before < 0.45 and control[0] == learns[0] | {"imitation_steps": 0}
    assert len(learns) == 1 + learnt_run.STEPS
    assert learns[20]["accuracy"] - before > 0.4, "a control of 20 steps would show nothing"
    assert learns[-1]["accuracy"] >= 0.95, "of 152 whole runs, twice as long, one ended at 0.975: docs/quickstart.md"
    assert control[-1]["accuracy"] - before <= 0.05
    for run_folder, steps in ((folder / "run", learns), (tmp_path / "run", control)):
        limit = logprob_rounding(run_folder / "model", MOST_TOKENS)
        assert max(line["parity"] for line in steps[1:]) < limit


@pytest.mark.parametrize(
    ("executor", "is_host", "dtype"),
    [("hf", False, "float32"), ("vllm", False, "float32"), ("sglang", True, "float32"), ("sglang", False, "bfloat16")],
)
def test_sampler_has_the_trainers_dtype_where_it_has_that(executor: str, is_host: bool, dtype: str) -> None:
    device: Any = SimpleNamespace(spec=SimpleNamespace(is_host=is_host))
    assert run.sampler_dtype(executor, device) == dtype
