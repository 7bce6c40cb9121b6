"""CPGD (arXiv:2505.12504): the policy gradient, stopped at a bound, with a pull back to the policy that sampled."""

from rlcore.examples.algorithms.loop import Algorithm, main
from rlcore.ops import LossFn, cpgd


class CPGD(Algorithm):
    """Clipped policy gradient optimization with policy drift."""

    token_weights = "token-mean"

    def loss_fn(self) -> LossFn:
        return cpgd(drift_coef=0.001)


if __name__ == "__main__":
    main(CPGD())
