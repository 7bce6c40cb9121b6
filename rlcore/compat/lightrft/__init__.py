"""LightRFT's strategy over rlcore's engines: a program under torchrun, with the imports changed.

Every rank runs the program. A strategy builds a ``TrainEngine`` over all ranks and an ``InferenceEngine`` on each (or
one over all), which take turns on the devices. Names, defaults and formulas are LightRFT's. What is not supported is
refused by name.
"""

from rlcore.compat.lightrft.actor import ActorLanguage
from rlcore.compat.lightrft.configuration import StrategyConfig
from rlcore.compat.lightrft.fake_strategy import FakeStrategy, get_fake_strategy
from rlcore.compat.lightrft.generation import EngineStatus, GeneratedSequence
from rlcore.compat.lightrft.losses import PolicyLoss, compute_approx_kl, masked_mean
from rlcore.compat.lightrft.strategy import DeepspeedStrategy, FSDPV2Strategy, get_strategy, is_engine
from rlcore.compat.lightrft.strategy_base import StrategyBase

__all__ = [
    "ActorLanguage",
    "DeepspeedStrategy",
    "EngineStatus",
    "FSDPV2Strategy",
    "FakeStrategy",
    "GeneratedSequence",
    "PolicyLoss",
    "StrategyBase",
    "StrategyConfig",
    "compute_approx_kl",
    "get_fake_strategy",
    "get_strategy",
    "is_engine",
    "masked_mean",
]
