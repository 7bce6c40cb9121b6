"""A run of the quickstart that learns: its folder, and the model with which GRPO began. Several files look at it."""

from __future__ import annotations

from pathlib import Path

from tests.warm import ENGINES, run_warm

STEPS = 50
"""As many as it takes to learn, twice over."""
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
    settings = {"RLCORE_CACHE": str(folder / "cache")}
    found = run_warm(["-c", _EXPORTING, *options], env=settings, cwd=folder, modules=ENGINES)
    assert found.returncode == 0, found.stderr
