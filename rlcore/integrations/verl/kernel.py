"""verl's fused log-probabilities and entropies by ``linear_logprob``."""

from __future__ import annotations

from torch import Tensor
from verl.utils.experimental import torch_functional

from rlcore.ops import linear_logprob


class LinearLogprobForPPO(torch_functional.FusedLinearForPPO):  # type: ignore[misc]
    """verl's module with the backend "torch" on ``linear_logprob``; the backend "liger" stays verl's.

    It makes no logits, and its gradients need no second pass over them in chunks. Entropies are float32 whatever the
    dtype of ``hidden_states``; verl's are rounded to that dtype.
    """

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, shaped like ``input_ids``.

        Args:
            hidden_states: [..., H].
            vocab_weights: [V, H].
            input_ids: [...], the token that each row scores.
            temperature: > 0; the logits are divided by it.
        """
        if self.impl_backend != "torch":
            scores: tuple[Tensor, Tensor] = super().forward(hidden_states, vocab_weights, input_ids, temperature)
            return scores
        logprob, entropy = linear_logprob(
            hidden_states, vocab_weights, input_ids, temperature=temperature, with_entropy=True
        )
        assert entropy is not None, "it was asked for"
        return logprob, entropy


def install() -> None:
    """Put the class in the place of verl's, which verl's models look up at each forward."""
    torch_functional.FusedLinearForPPO = LinearLogprobForPPO
