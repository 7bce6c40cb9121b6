"""Every supported version of SGLang has all that rlcore uses. Nothing here needs SGLang, but for the last tests."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.doctor.packages import SGLANG
from rlcore.engines.sampling.sglang import versions
from rlcore.engines.sampling.sglang.arguments import _OWN
from rlcore.errors import UnsupportedError
from tests.engines.sampling.sglang import contract
from tests.engines.sampling.vllm.typed_uses import interfaces

RECORD: dict[str, Any] = json.loads(contract.RECORD.read_text())
"""What each version has."""


def names_of(version: str) -> dict[str, set[str]]:
    return {name: set(members) for name, members in RECORD[version]["names"].items()}


@pytest.mark.parametrize("version", RECORD)
def test_a_version_has_all_that_is_used(version: str) -> None:
    assert contract.lacking(contract.uses(), names_of(version).get) == [], f"run {contract.__name__} if a use is new"


def test_the_record_reaches_from_the_oldest_to_the_newest_version() -> None:
    numbers = [tuple(map(int, re.findall(r"\d+", version)[:3])) for version in RECORD]
    assert (min(numbers), max(numbers)) == (versions.OLDEST, versions.NEWEST) == (SGLANG.least, SGLANG.newest)
    assert f'sglang = ["sglang>={next(iter(RECORD))}"]' in (contract.ROOT / "pyproject.toml").read_text()
    assert len(RECORD) >= 3
    assert all(re.fullmatch("[0-9a-f]{64}", wheel["sha256"]) for wheel in RECORD.values())


def test_a_missing_member_is_seen() -> None:
    names = names_of("0.5.21")
    names["sglang.srt.managers.scheduler.Scheduler"].remove("flush_cache(empty_cache)")
    del names["sglang.srt.layers.sampler.register_sampler_backend"]
    assert contract.lacking(contract.uses(), names_of("0.5.21").get) == []
    assert contract.lacking(contract.uses(), names.get) == [
        "sglang.srt.layers.sampler.register_sampler_backend",
        "sglang.srt.managers.scheduler.Scheduler: flush_cache(empty_cache)",
    ]


def test_uses_are_collected_from_the_code() -> None:
    """The uses of coroutines, and of fields by name, are among them."""
    found = contract.uses()
    manager = found["sglang.srt.managers.tokenizer_manager.TokenizerManager"]
    assert {"generate_request(#1)", "get_internal_state", "abort_request"} <= manager
    assert {"tp_size", "skip_tokenizer_init", "watchdog_timeout"} <= found[contract.ARGUMENTS]
    assert {"sampling_seed", "stop_token_ids"} <= found[contract.SAMPLING]
    assert found["sglang.srt.managers.schedule_batch.Req"] == {"finished", "output_ids", "rid"}


def test_nothing_is_declared_that_is_not_used() -> None:
    used = contract.uses()
    for interface in interfaces(contract.OURS / "interfaces.py").values():
        for name in interface.classes:
            assert interface.members.keys() <= used[name], name


def test_only_one_file_imports_sglang() -> None:
    importing = set()
    for path in contract.OURS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] in ("sglang", "torch_memory_saver") for name in names):
                importing.add(path.name)
    assert importing == {"versions.py"}


@pytest.mark.parametrize("version", ["0.5.15.post1", "0.5.17", "0.5.23"])
def test_supported_versions(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.check_version(version)
    assert not caplog.records


def test_newer_versions_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    versions.check_version("0.6.0")
    (told,) = caplog.messages
    assert told == (
        "SGLang 0.6.0 is newer than what rlcore was checked against, 0.5.15 to 0.5.23; if something fails in it, run: "
        "pip install 'sglang<=0.5.23'"
    )


@pytest.mark.parametrize("version", ["0.5.14", "dev"])
def test_older_versions_are_refused_with_the_command(version: str) -> None:
    with pytest.raises(
        UnsupportedError,
        match=re.escape(
            f"SGLang {version} is not supported: the sglang executor knows 0.5.15 to 0.5.23; run: pip install"
        ),
    ):
        versions.check_version(version)


def test_reserved_arguments_are_sglangs_own() -> None:
    """A name that SGLang does not have would hide a misspelling."""
    chosen = {"attention_backend", "disable_cuda_graph", "disable_overlap_schedule", "grammar_backend", "log_level"}
    chosen |= {"max_total_tokens", "mem_fraction_static", "random_seed", "watchdog_timeout"}
    assert _OWN.keys() >= contract.uses()[contract.ARGUMENTS] - chosen


@pytest.mark.sglang
def test_the_installed_version_has_all_that_is_used() -> None:
    found = importlib.util.find_spec("sglang")
    assert found and found.origin
    root = Path(found.origin).parents[1]

    def read(name: str) -> str | None:
        return (root / name).read_text() if (root / name).exists() else None

    paths = [str(path.relative_to(root)) for path in Path(found.origin).parent.glob("srt/arg_groups/fields/*.py")]
    assert contract.lacking(contract.uses(), contract.SglangWheel(read, paths).members) == []
