"""Weight syncs where NPUs share no memory between processes: an old CANN, an old torch_npu; over the simulated CANN.

What is old is planted: the version that CANN's files tell, and a torch back end that takes from torch_npu what its
releases before 7.2.0 do not have, in every process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(600)]

TASK = Path(__file__).with_name("sync_without_ipc.py")


def old_cann(folder: Path, home: Path) -> dict[str, str]:
    """The same libraries, of which the files say that they are older."""
    folder.mkdir()
    for path in home.iterdir():
        if path.name != "ascend_toolkit_install.info":
            (folder / path.name).symlink_to(path)
    (folder / "ascend_toolkit_install.info").write_text("version=8.2.RC1\n")
    return {"ASCEND_HOME_PATH": str(folder)}


def old_torch_npu(folder: Path, _: Path) -> dict[str, str]:
    info = folder / "acme_old-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-old\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nacme_old = acme_old:take_away\n")
    (folder / "acme_old.py").write_text(
        "def take_away():\n    import torch, torch_npu\n    del torch.TypedStorage._share_npu_\n"
    )
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (old_cann, "IPC needs CANN 8.3.RC1 or newer, this is 8.2.RC1"),
        (old_torch_npu, "this torch_npu has no IPC of tensors, which came with its 7.2.0 releases"),
    ],
)
def test_packed_goes_through_the_hosts_memory_and_says_why(
    run_simulated: Any, _simulated: dict[str, str], tmp_path: Path, plant: Any, reason: str
) -> None:
    env = plant(tmp_path / "planted", Path(_simulated["ASCEND_HOME_PATH"]))
    result = run_simulated(str(TASK), **env, RLCORE_RUNTIME=str(tmp_path / "run"))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["arrived"] == [True] * 3
    assert [report["route"] for report in found["reports"]] == ["packed"] * 3
    assert {report["why_on_host"] for report in found["reports"]} == {reason}
    assert [report["handles_opened"] for report in found["reports"]] == [1, 0, 0]
    assert all(report["moved_bytes"] > 0 for report in found["reports"])
    assert "route='direct'" in found["direct"] and reason in found["direct"]
    refused = [line for line in (tmp_path / "cann.log").read_text().splitlines() if line.startswith("refused")]
    assert not refused
