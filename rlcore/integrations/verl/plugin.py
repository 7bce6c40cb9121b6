"""The module that verl imports when it is imported itself, by the entry-point group ``verl.plugins``.

verl says nothing at its usual log level when a plugin fails, so this says it.
"""

from __future__ import annotations

import importlib
import logging
import os

ENGINE_VENDOR = "VERL_ENGINE_VENDOR"
"""verl's variable that names the vendor of engines."""


def _load() -> None:
    importlib.import_module("rlcore.integrations.verl.platform")
    importlib.import_module("rlcore.integrations.verl.kernel").install()
    if os.environ.get(ENGINE_VENDOR) == "rlcore":  # verl's engines take seconds to import
        importlib.import_module("rlcore.integrations.verl.engine")
        rollouts = importlib.import_module("verl.workers.rollout.base")._ROLLOUT_REGISTRY
        rollouts["vllm", "async"] = "rlcore.integrations.verl.rollout.PlannedServerAdapter"


try:
    _load()
except Exception:
    logging.getLogger(__name__).warning("verl runs without rlcore, whose plugin failed:", exc_info=True)
    raise
