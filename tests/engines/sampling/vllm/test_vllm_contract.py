"""Every supported version of vLLM has all that rlcore uses, and differs only where that is expected."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.arguments import _OWN
from rlcore.engines.sampling.vllm.extension import RlcoreWorkerExtension
from rlcore.errors import UnsupportedError
from tests.devices.ascend import vllm_contract as ascend_contract
from tests.engines.sampling.vllm import contract
from tests.engines.sampling.vllm.typed_uses import interfaces

RECORDS: dict[Any, dict[str, Any]] = {of: json.loads(of.RECORD.read_text()) for of in (contract, ascend_contract)}
"""The contracts with vLLM and with vllm-ascend: what each version has."""
RECORD = RECORDS[contract]


def names_of(of: Any, version: str) -> dict[str, set[str]]:
    return {name: set(members) for name, members in RECORDS[of][version]["names"].items()}


@pytest.mark.parametrize(("of", "version"), [(of, version) for of in RECORDS for version in RECORDS[of]])
def test_a_version_has_all_that_is_used(of: Any, version: str) -> None:
    assert contract.lacking(of.uses(), names_of(of, version).get) == [], f"run {of.__name__} again if a use is new"


@pytest.mark.parametrize("version", RECORD)
def test_the_weight_transfer_back_end_leaves_nothing_abstract(version: str) -> None:
    (wanted,) = RECORD[version]["abstract"].values()
    assert {"init_transfer_engine", "receive_weights"} <= set(wanted)
    assert ("trainer_send_weights" in wanted) is (version == "0.26.0"), "where the base class differs"
    assert set(wanted) <= contract.transfer_members()


def test_the_record_reaches_from_the_oldest_to_the_newest_version() -> None:
    minors = [tuple(map(int, version.split(".")[:2])) for version in RECORD]
    assert (min(minors), max(minors)) == (versions.OLDEST, versions.NEWEST)
    assert all(re.fullmatch("[0-9a-f]{64}", wheel["sha256"]) for wheel in RECORD.values())


@pytest.mark.parametrize(
    ("of", "version", "owner", "member", "gone"),
    [
        (
            *(contract, "0.26.0", "vllm.v1.engine.llm_engine.LLMEngine"),
            *("reset_prefix_cache(reset_running_requests)", "vllm.device_allocator.cumem.unmap_and_release"),
        ),
        (
            *(ascend_contract, "0.23.0", "vllm_ascend.device_allocator.camem.AllocationData"),
            *("tag", "vllm_ascend.worker.worker.NPUWorker"),
        ),
    ],
    ids=["vllm", "vllm_ascend"],
)
def test_a_missing_member_is_seen(of: Any, version: str, owner: str, member: str, gone: str) -> None:
    names = names_of(of, version)
    names[owner].remove(member)
    del names[gone]
    assert contract.lacking(of.uses(), names.get) == sorted([f"{owner}: {member}", gone])


def test_uses_are_collected_from_the_code() -> None:
    """Also where objects of vLLM's come from functions, attributes, loops and what those hold."""
    found = contract.uses()
    engine = found["vllm.v1.engine.llm_engine.LLMEngine"]
    assert {"add_request(#3)", "from_vllm_config(disable_log_stats)", "vllm_config", "collective_rpc(args)"} <= engine
    assert {"kv_cache_memory_bytes", "logprobs_mode", "worker_extension_cls"} <= found[contract.ARGUMENTS]
    assert {"output_kind", "stop_token_ids", "seed"} <= found[contract.SAMPLING]
    assert found["vllm._custom_ops"] == {"_supports_onednn"}
    assert found["vllm.config.model.ModelConfig"] == {"dtype", "max_model_len", "model"}
    assert found["vllm.logprobs.Logprob"] == {"logprob"}
    assert {"tag", "handle"} <= found["vllm.device_allocator.AllocationData"]
    assert "update_weights(#1)" in found["vllm.distributed.weight_transfer.base.VLLMWeightSyncClient"]


def test_nothing_is_declared_that_is_not_used() -> None:
    used = {name: {one.removesuffix("?") for one in members} for name, members in contract.uses().items()}
    for interface in interfaces(contract.OURS / "interfaces.py").values():
        for name in interface.classes:
            assert interface.members.keys() <= used[name], name


def test_what_is_asked_for_first_is_in_some_version() -> None:
    optional = [(name, one) for name, members in contract.uses().items() for one in members if one.endswith("?")]
    assert {one for _, one in optional} == {"get_file_store_init_method?", "post_kv_cache_wake_up?"}
    for name, one in optional:
        versions_with_it = [version for version, wheel in RECORD.items() if one in wheel["names"][name]]
        assert versions_with_it and versions_with_it != list(RECORD), "ask for nothing that all have"


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("from vllm.v1.engine.llm_engine import LLMMotor", "vllm.v1.engine.llm_engine.LLMMotor"),
        ("import vllm._custom_ops as ops\nops._supports_mkl = 1", "vllm._custom_ops: _supports_mkl"),
        ("def f(engine: VllmEngine): engine.abort_requests([])", "vllm.v1.engine.llm_engine.LLMEngine: abort_requests"),
        (
            "def f(engine: VllmEngine): engine.step(1)",
            "vllm.v1.engine.llm_engine.LLMEngine: step(#1)",
        ),
        (
            "def f(engine: VllmEngine): engine.reset_prefix_cache(running=True)",
            "vllm.v1.engine.llm_engine.LLMEngine: reset_prefix_cache(running)",
        ),
        (
            "def f(worker: VllmWorker): return worker.vllm_config.model_config.longest",
            "vllm.config.model.ModelConfig: longest",
        ),
        (
            "class A:\n def __init__(self, worker: VllmWorker): self.runner = worker.model_runner\n"
            " def f(self): self.runner.kv_cache.zero_()",
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner: kv_cache",
        ),
        (
            "def f(engine: VllmEngine):\n for output in engine.step():\n  (one,) = output.outputs\n  one.tokens",
            "vllm.outputs.CompletionOutput: tokens",
        ),
        ("def f(): return [one.size for one in allocations('weights')]", "vllm.device_allocator.AllocationData: size"),
    ],
)
def test_a_wrong_use_is_found(code: str, missing: str) -> None:
    for version, wheel in RECORD.items():
        names = {name: set(members) for name, members in wheel["names"].items()}
        assert missing in contract.lacking(contract.uses_in(code), names.get), version


def test_only_two_files_import_vllm() -> None:
    importing = set()
    for path in contract.OURS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "vllm" for name in names):
                importing.add(path.name)
    assert importing == {"versions.py", "meta_model.py"}


def test_the_extensions_names_are_prefixed() -> None:
    own = [name for name in vars(RlcoreWorkerExtension) if not name.startswith("__")]
    assert own and all(name.startswith("rlcore_") for name in own)


@pytest.mark.slow  # where there is no vLLM, every import of it here shows it
def test_the_extension_needs_neither_vllm_nor_ray(run_python: Any) -> None:
    code = "import sys, rlcore.engines.sampling.vllm.extension; print({'vllm', 'ray'} & sys.modules.keys())"
    assert run_python(code).stdout == "set()\n"


@pytest.mark.parametrize("version", ["0.26.0", "0.30.1rc2", "0.33.4+cu129", "0.28.0"])
def test_supported_versions(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.check_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0rc1"])
def test_newer_versions_are_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.check_version(version)
    (told,) = caplog.messages
    assert told == (
        f"vLLM {version} is newer than what rlcore was checked against, 0.26 to 0.33; if something fails in it, run: "
        "pip install 'vllm<=0.33.99'"
    )


@pytest.mark.parametrize("version", ["0.25.9", "dev"])
def test_older_versions_are_refused_with_the_command(version: str) -> None:
    with pytest.raises(
        UnsupportedError,
        match=re.escape(f"vLLM {version} is not supported: the vllm executor knows 0.26 to 0.33; run: pip install"),
    ):
        versions.check_version(version)


@pytest.mark.parametrize(
    ("is_host", "said"), [(True, "what is installed is not vLLM's build"), (False, "is vLLM's build")]
)
def test_a_build_for_other_devices_is_refused(is_host: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: Any = types.ModuleType("vllm.platforms")
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    device = SimpleNamespace(name="here:0", spec=SimpleNamespace(is_host=is_host))
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_host)
    versions.check_platform(device)
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: not is_host)
    with pytest.raises(
        UnsupportedError, match=f"^vLLM on here:0 is not supported: .*{said} for the CPU; build the engine"
    ):
        versions.check_platform(device)


def test_reserved_arguments_are_vllms_own() -> None:
    """A name that vLLM does not have would hide a misspelling."""
    assert _OWN.keys() >= contract.uses()[contract.ARGUMENTS] - {
        "seed",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
    }


@pytest.mark.vllm
def test_the_installed_version_has_all_that_is_used() -> None:
    found = importlib.util.find_spec("vllm")
    assert found and found.origin
    root = Path(found.origin).parents[1]

    def read(name: str) -> str | None:
        return (root / name).read_text() if (root / name).exists() else None

    assert contract.lacking(contract.uses(), contract.Wheel(read).members) == []


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("version", RECORD)
def test_the_record_is_what_the_wheel_has(version: str, tmp_path: Path, run_python: Any) -> None:
    run_python(["-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), f"vllm=={version}"])
    wheels = list(tmp_path.glob("*.whl"))
    if not wheels:
        pytest.skip(f"needs a package index with vllm {version}")
    assert contract.extract(wheels[0]) == RECORD[version]
