"""Asynchronous rollout: samplers make trajectories while the trainer trains; each name is imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.rollout.client import RolloutClient as RolloutClient
    from rlcore.rollout.controller import RolloutController as RolloutController
    from rlcore.rollout.episode import Episode as Episode
    from rlcore.rollout.lending import LentDevices as LentDevices
    from rlcore.rollout.remote_verifier import RemoteVerifier as RemoteVerifier
    from rlcore.rollout.reward_pool import RewardPool as RewardPool
    from rlcore.rollout.staleness import StalenessBound as StalenessBound
    from rlcore.rollout.trajectory import Trajectory as Trajectory
    from rlcore.rollout.trajectory import collate_trajectories as collate_trajectories
    from rlcore.rollout.workflow import Grouped as Grouped
    from rlcore.rollout.workflow import MultiTurn as MultiTurn
    from rlcore.rollout.workflow import SingleTurn as SingleTurn
    from rlcore.rollout.workflow import Workflow as Workflow

_HOME = {
    "Episode": "episode",
    "Grouped": "workflow",
    "LentDevices": "lending",
    "MultiTurn": "workflow",
    "RemoteVerifier": "remote_verifier",
    "RewardPool": "reward_pool",
    "RolloutClient": "client",
    "RolloutController": "controller",
    "SingleTurn": "workflow",
    "StalenessBound": "staleness",
    "Trajectory": "trajectory",
    "Workflow": "workflow",
    "collate_trajectories": "trajectory",
}

__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlcore.rollout' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rlcore.rollout.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
