"""GSPO (arXiv:2507.18071): the ratio of whole sequences, a mean over tokens, with bounds as narrow as it is small."""

from rlcore.examples.algorithms.loop import Algorithm, main
from rlcore.ops import LossFn, gspo


class GSPO(Algorithm):
    """Group sequence policy optimization."""

    def loss_fn(self) -> LossFn:
        return gspo(clip_low=3e-4, clip_high=4e-4)


if __name__ == "__main__":
    main(GSPO())
