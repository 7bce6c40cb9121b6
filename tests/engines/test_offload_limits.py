"""What of host memory a process may take: control groups of both versions, nested, without limits, in containers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rlcore
from rlcore.engines.offload import host_arena as arena_module
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.offload.host_limits import HostLimit, cgroup_limits
from rlcore.errors import DeviceError, InvalidInputError

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def write_group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def found(tmp_path: Path, membership: str) -> list[tuple[int, int]]:
    (tmp_path / "cgroup").write_text(membership)
    return [(limit.limit_bytes, limit.used_bytes) for limit in cgroup_limits(tmp_path, tmp_path / "cgroup")]


def test_version_2_counts_every_parent_and_not_the_cache(tmp_path: Path) -> None:
    write_group(tmp_path / "pod" / "box", V2, "1000", 700, 300)
    write_group(tmp_path / "pod", V2, "5000", 4900)
    assert found(tmp_path, "0::/pod/box\n") == [(1000, 400), (5000, 4900)]


def test_version_1_counts_only_the_memory_controller(tmp_path: Path) -> None:
    write_group(tmp_path / "memory" / "box", V1, "1000", 700, 100)
    write_group(tmp_path / "cpu" / "box", V1, "1", 1)
    assert found(tmp_path, "4:cpu:/box\n3:hugetlb,memory:/box\n1:name=systemd:/box\n") == [(1000, 600)]


def test_a_group_without_a_limit_is_none(tmp_path: Path) -> None:
    write_group(tmp_path, V2, "max", 700)
    write_group(tmp_path / "memory", V1, "9223372036854771712", 700)
    assert found(tmp_path, "0::/\n4:memory:/\n") == []


def test_a_container_whose_path_is_the_hosts_uses_the_top(tmp_path: Path) -> None:
    write_group(tmp_path, V2, "1000", 10)
    assert found(tmp_path, "0::/kubepods/not/mounted\n") == [(1000, 10)]


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path, tmp_path / "absent") == []


def test_the_limits_of_this_machine_can_be_read() -> None:
    assert all(limit.limit_bytes > limit.used_bytes >= 0 for limit in cgroup_limits())


def test_the_control_groups_limit_refuses_an_offload_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_arenas", {})
    limit = HostLimit("the memory limit of the control group /box", 5000, 4000)
    monkeypatch.setattr(arena_module, "cgroup_limits", lambda: [limit])
    tensor = torch.ones(1001, dtype=torch.uint8)
    group = OffloadGroup(rlcore.get_device("cpu"), lambda: [tensor], lambda guard, state: None)
    with pytest.raises(DeviceError, match=r"needs 1024 bytes .* group /box is 5000 bytes, of which 4000 are used"):
        group.offload()
    assert tensor.sum() == 1001


@pytest.mark.parametrize("value", [0, -1, 1.5, "1GiB", True])
def test_a_limit_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match="host_memory_bytes must be a whole number of at least 1 or None"):
        arena_module.HostArena(rlcore.get_device("cpu")).set_limit(value)  # type: ignore[arg-type]
