"""Padded batches in AReaLite's names, from episodes and back.

Letters: N sequences, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.rollout import Episode, Trajectory, collate_trajectories


class TensorBatch(dict[str, Tensor]):
    """A padded batch in AReaLite's names; it stands in for its TensorDict."""

    def to(self, device: Any) -> TensorBatch:
        """Return it with all tensors on a device. rlcore's engines take batches on the host, too."""
        return TensorBatch({name: value.to(device) for name, value in self.items()})

    @property
    def batch_size(self) -> torch.Size:
        return self["input_ids"].shape[:1]


def padded(trajectories: Sequence[Trajectory]) -> TensorBatch:
    """Return a batch with a row for each trajectory."""
    found = collate_trajectories([trajectories])
    return TensorBatch(
        input_ids=found["input_ids"],
        attention_mask=found["attention_mask"],
        loss_mask=found["loss_mask"].long(),
        logprobs=found["rollout_logprobs"],
        versions=found["versions"],
        rewards=found["rewards"],
    )


def batch_of(episodes: Sequence[Episode]) -> TensorBatch:
    """Return a batch with a row for each sequence of these episodes."""
    return padded([one for episode in episodes for one in episode.trajectories])


def trajectories_of(batch: Mapping[str, Tensor]) -> list[Trajectory]:
    """Return the rows of a workflow's tensors."""
    needed = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
    lacking = [name for name in needed if name not in batch] if isinstance(batch, Mapping) else needed
    if lacking:
        raise InvalidInputError(f"arun_episode() must return {', '.join(needed)}; {', '.join(lacking)} is missing")
    mask_NL = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    for name in needed:
        shape = mask_NL.shape[:1] if name == "rewards" else mask_NL.shape
        if batch[name].shape != shape or mask_NL.dim() != 2:
            raise InvalidInputError(
                f"arun_episode() must return rewards [N] and all else [N, L]; {name} is {list(batch[name].shape)}, and "
                f"attention_mask or input_ids {list(mask_NL.shape)}"
            )
    return [
        Trajectory(
            batch["input_ids"][row][mask_NL[row]].tolist(),
            batch["loss_mask"][row][mask_NL[row]].bool().tolist(),
            batch["logprobs"][row][mask_NL[row]].tolist(),
            batch["versions"][row][mask_NL[row]].tolist(),
            float(batch["rewards"][row]),
        )
        for row in range(len(mask_NL))
    ]
