"""A trajectory: one sequence of tokens as the model saw them, which of them it sampled, and how; and batches of them.

Letters: N sequences, L longest sequence.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlcore.arguments import LIST, Kind, plain_number, takes
from rlcore.engines.sampling.completion import Completion, RequestOutput
from rlcore.errors import InvalidInputError
from rlcore.rollout.runs import Runs, joined
from rlcore.routing.replay import joined_routes
from rlcore.routing.routers import ROUTES
from rlcore.sequence_input import joined_inputs

NOT_SAMPLED = -1
"""The version of a token that the model was given."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence of an episode. The first four have one entry a token."""

    token_ids: list[int]
    loss_mask: Sequence[bool]
    """True for the tokens that the model sampled. It is kept as ``Runs``, and equal to the list that was given."""
    logprobs: list[float]
    """Natural log of the probability that a token was sampled with; 0 where it was not sampled."""
    versions: Sequence[int]
    """The version of the weights that sampled a token; -1 where it was not sampled. It is kept as ``Runs``."""
    reward: float = 0.0
    """A scalar of NumPy or torch is kept as the number in it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Plain values of your own, such as the text of the answer."""
    routed_experts: Tensor | None = None
    """The experts of each token that ran, [tokens, layers, experts a token], if the sampler returns them."""
    inputs: dict[str, Tensor] = field(default_factory=dict, compare=False)
    """Inputs of the sequence beside its tokens, such as pixels of images."""

    def __post_init__(self) -> None:
        lengths = [len(part) for part in (self.token_ids, self.loss_mask, self.logprobs, self.versions)]
        if len(set(lengths)) > 1 or not lengths[0]:
            raise InvalidInputError(
                "a Trajectory needs token_ids, loss_mask, logprobs and versions of one length of at least 1, "
                f"got {', '.join(map(str, lengths))}"
            )
        reward = plain_number(self.reward)
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise InvalidInputError(f"the reward of a Trajectory must be a finite number, got {self.reward!r}")
        object.__setattr__(self, "reward", reward)
        object.__setattr__(self, "loss_mask", Runs.of(self.loss_mask))
        object.__setattr__(self, "versions", Runs.of(self.versions))

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        completion: Completion,
        *,
        reward: float = 0.0,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Trajectory:
        """Return a prompt with one completion of it.

        Args:
            inputs: what the prompt has beside its tokens, ``RequestOutput.inputs``.
        """
        given = len(prompt)
        spans = completion.version_spans
        return cls(
            [*prompt, *completion.token_ids],
            Runs([(False, given), (True, len(completion.token_ids))]),
            [0.0] * given + completion.logprobs,
            Runs([(NOT_SAMPLED, given), *((span.version, span.end - span.start) for span in spans)]),
            reward,
            {"text": completion.text},
            completion.routed_experts,
            dict(inputs or {}),
        )

    @property
    def num_sampled(self) -> int:
        return sum(length for is_sampled, length in Runs.of(self.loss_mask).runs if is_sampled)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of a sampled token; None if there is none."""
        versions = (version for version, _ in Runs.of(self.versions).runs)
        return min((version for version in versions if version != NOT_SAMPLED), default=None)

    def followed_by(
        self, prompt: Sequence[int], completion: Completion, inputs: Mapping[str, Tensor] | None = None
    ) -> Trajectory | None:
        """Return this with what another turn added, if that turn's prompt begins with these tokens; else None.

        Args:
            inputs: those of the turn's prompt, which are of all turns so far.
        """
        length = len(self.token_ids)
        if len(prompt) < length or list(prompt[:length]) != self.token_ids:
            return None
        turn = Trajectory.of(prompt[length:], completion)
        joined = {
            name: getattr(self, name) + getattr(turn, name)
            for name in ("token_ids", "loss_mask", "logprobs", "versions")
        }
        routes = self._routes_with(completion)
        return replace(self, **joined, extra=turn.extra, routed_experts=routes, inputs=dict(inputs or {}))

    def _routes_with(self, completion: Completion) -> Tensor | None:
        """Return the experts of each token where it was sampled: the last one so far ran first in the next turn."""
        own, later = self.routed_experts, completion.routed_experts
        return None if own is None or later is None else torch.cat([own, later[len(own) :]])

    @property
    def is_plain(self) -> bool:
        """True if ``plain`` has all of it: neither experts nor inputs beside the tokens."""
        return self.routed_experts is None and not self.inputs

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, without the experts and the inputs beside the tokens."""
        return {
            "token_ids": list(self.token_ids),
            "loss_mask": list(self.loss_mask),
            "logprobs": list(self.logprobs),
            "versions": list(self.versions),
            "reward": self.reward,
            "extra": copy.deepcopy(self.extra),
            "routed_experts": None,
            "inputs": {},
        }


def joined_turns(outputs: Iterable[RequestOutput]) -> list[Trajectory]:
    """Return the sequences that these requests made, in order of their first turn.

    A completion whose prompt begins with all tokens of an earlier sequence continues it; every other one begins a
    sequence. So each sampled token is in exactly one sequence, after the very tokens that the model saw before it.
    """
    found: list[Trajectory] = []
    for output in outputs:
        for completion in output.outputs:
            for index, earlier in reversed(list(enumerate(found))):
                if (longer := earlier.followed_by(output.prompt_token_ids, completion, output.inputs)) is not None:
                    found[index] = longer
                    break
            else:
                found.append(Trajectory.of(output.prompt_token_ids, completion, inputs=output.inputs))
    return found


_GROUPS = Kind(
    "a list or tuple of lists of Trajectory",
    lambda value: LIST.has(value) and all(LIST.has(g) and all(isinstance(o, Trajectory) for o in g) for g in value),
)


@takes("collate_trajectories()", groups=_GROUPS)
def collate_trajectories(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """Return one padded batch of the trajectories of several episodes, in order.

    Returns:
        ``input_ids`` [N, L] int64, right-padded; ``attention_mask`` and ``loss_mask`` [N, L] bool;
        ``rollout_logprobs`` [N, L] float32, the sampler's, 0 where no token was sampled, and ``old_logprobs``, a copy:
        for ``decoupled_ppo`` replace it by the trainer's ``forward_logprobs(batch)``; ``versions`` [N, L] int64, -1
        where no token was sampled; ``rewards`` [N] float32; ``group`` [N] int64, the index of the episode, as
        ``group_advantage(rewards, group=group)`` takes it. If trajectories have them, also ``routed_experts`` [N, L,
        layers, experts a token] int16. Inputs beside the tokens are each a ``SequenceInput``.

    Raises:
        InvalidInputError: there is no trajectory.
    """
    each = [one for group in groups for one in group]
    if not each:
        raise InvalidInputError("collate_trajectories() needs at least one trajectory, got none")
    lengths = np.array([len(one.token_ids) for one in each])
    is_token = np.arange(lengths.max()) < lengths[:, None]

    def padded(entries: NDArray[Any], padding: int = 0) -> Tensor:
        # All rows at once: row by row it takes eight to ten times as long.
        rows = np.full(is_token.shape, padding, entries.dtype)
        rows[is_token] = entries
        return torch.from_numpy(rows)

    def listed(lists: Iterable[list[Any]], dtype: type) -> NDArray[Any]:
        return np.fromiter(itertools.chain.from_iterable(lists), dtype, lengths.sum())

    routes = joined_routes([one.routed_experts for one in each], is_token.shape)
    rollout_logprobs = padded(listed((one.logprobs for one in each), np.float32))
    return {
        "input_ids": padded(listed((one.token_ids for one in each), np.int64)),
        "attention_mask": torch.from_numpy(is_token),
        "loss_mask": padded(joined([Runs.of(one.loss_mask) for one in each], np.bool_)),
        "rollout_logprobs": rollout_logprobs,
        "versions": padded(joined([Runs.of(one.versions) for one in each], np.int64), NOT_SAMPLED),
        "old_logprobs": rollout_logprobs.clone(),
        "rewards": torch.tensor([float(one.reward) for one in each]),
        "group": torch.tensor([index for index, group in enumerate(groups) for _ in group]),
        **({} if routes is None else {ROUTES: routes}),
        **joined_inputs([one.inputs for one in each]),
    }
