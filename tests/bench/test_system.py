"""What a record says about where it was made, and what it must not say."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlcore.bench.measurement import system
from rlcore.bench.measurement.system import describe_system, installed_versions, recorded_environment


def test_system_is_this_machine(device: Any) -> None:
    found = describe_system(device)
    assert found.device == device.name
    assert found.host_processor_core_count == len(os.sched_getaffinity(0))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.host_memory_capacity_bytes == pytest.approx(pages, rel=0.1)
    if device.type == "cpu":
        assert (found.accelerators_per_node, found.accelerator_model_name) == (0, "")
    else:
        assert (found.accelerators_per_node, found.accelerator_model_name) == (device.count(), device.properties().name)


def test_versions_are_those_installed() -> None:
    found = installed_versions()
    assert found["torch"] == importlib.metadata.version("torch")
    assert "vllm" not in found or importlib.metadata.version("vllm")


def test_environment_is_recorded_by_allow_list(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("RLCORE_CACHE", "/home/someone")
    found = recorded_environment(device)
    assert found["OMP_NUM_THREADS"] == "2"
    assert not {"a secret", "/home/someone"} & set(found.values())


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    result = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_commit_is_that_of_the_checkout_the_code_is_in(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "theirs.txt").write_text("somebody else's repository")
    git(tmp_path, "add", "theirs.txt")
    git(tmp_path, "commit", "--quiet", "-m", "theirs")
    copy = tmp_path / "system.py"
    copy.write_text(Path(system.__file__).read_text())
    spec = importlib.util.spec_from_file_location("a_copy", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.source_commit() is None  # as when installed into an environment inside that repository
    git(tmp_path, "add", "system.py")
    git(tmp_path, "commit", "--quiet", "-m", "ours")
    assert module.source_commit() == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "theirs.txt").write_text("changed")
    assert module.source_commit() == f"{git(tmp_path, 'rev-parse', 'HEAD')}-modified"


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert system.source_commit() is None
