"""``rlcore chaos`` as users run it; ``--chaos-minutes 10`` runs it longer."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.chaos.driver import options_of, places_of
from rlcore.chaos.plan import plan_of
from tests.warm import ENGINES, warm

COMMAND = [sys.executable, "-m", "rlcore", "chaos", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_promises_are_kept_at_random_moments(pytestconfig: pytest.Config) -> None:
    minutes = pytestconfig.getoption("--chaos-minutes")
    command = [*COMMAND, "--minutes", str(minutes), "--seed", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * minutes + 1800, check=False)
    found = json.loads(done.stdout)
    assert [round_["violations"] for round_ in found["rounds"] if round_["violations"]] == [], done.stderr
    assert done.returncode == 0
    assert any(incident["outcome"] for round_ in found["rounds"] for incident in round_["incidents"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupt_ends_with_the_summary_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [*warm(*ENGINES), *COMMAND[1:], "--fault", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("seed 0: trainer on cpu:0")
        process.send_signal(number)
        said = process.communicate(timeout=120)[0]
    assert said.startswith("1 round(s), 0 incident(s)") and "promises that were not kept: none" in said
    assert process.returncode == 130
    assert list(tmp_path.glob("rlcore-chaos-*")) == []


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_promises_are_kept_with_vllm_as_sampler() -> None:
    options = options_of("cpu", ["kill", "none"])
    assert "vllm" in options.executors
    places = places_of(options.device)
    plans = (plan_of(seed, options.pairs(), places, "cpu", options.executors) for seed in itertools.count())
    for plan in itertools.islice((plan for plan in plans if plan.layout.executor == "vllm"), 2):
        command = options.command(plan.seed).split()[2:]
        done = subprocess.run([*COMMAND, *command], capture_output=True, text=True, timeout=850, check=False)
        assert f"seed {plan.seed}: " in done.stdout and ", vllm on" in done.stdout
        assert done.returncode == 0, done.stdout
