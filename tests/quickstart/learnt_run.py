"""A run of the quickstart that learns: its folder, and the model with which GRPO began. Several files look at it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.warm import ENGINES, warm, without_settings

STEPS = 50
"""As many as it takes to learn, twice over."""
LONGEST_S = 1700.0
"""On however busy a machine; it takes about 80 s. Tests that may have to wait for it have ``timeout`` in accord."""
_EXPORTING = """
from pathlib import Path
from rlcore.quickstart import run

class Exporting(run.Quickstart):
    def record(self, metrics):
        if metrics["step"] == 0:
            self.train.export(Path("start"))
        super().record(metrics)

run.Quickstart = Exporting
from rlcore.cli.main import main
main()
"""


def learn(folder: Path) -> None:
    """Leave the run in ``run``, and in ``start`` the model that imitation made."""
    options = ["quickstart", "--device", "cpu", "--seed", "0", "--steps", str(STEPS), "--output", "run"]
    command = [*warm(*ENGINES), "-c", _EXPORTING, *options]
    environment = without_settings() | {"RLCORE_CACHE": str(folder / "cache")}
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    assert found.returncode == 0, found.stderr
