"""AReaLite's interface over rlcore's engines: its GRPO program (tag v0.3.0-lite) with the imports changed.

AReaLite's program runs under torchrun and talks to servers that a launcher has started. Here it is one process: the
first ``initialize`` of a rollout engine builds an ``InferenceEngine`` of the model, and later ones share it, as clients
share servers. Names, defaults and formulas are AReaLite's. What is not supported is refused by name; nothing is ignored
but the settings of servers, schedulers and name services (`IGNORED`), which are not there.
"""

from rlcore.compat.areal.batches import TensorBatch
from rlcore.compat.areal.configuration import (
    DatasetConfig,
    FinetuneSpec,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    PPOActorConfig,
)
from rlcore.compat.areal.configuration_file import IGNORED, load_expr_config
from rlcore.compat.areal.inference_engine import RemoteInfEngine, RemoteSGLangEngine, RemotevLLMEngine, WeightUpdateMeta
from rlcore.compat.areal.train_engine import FSDPPPOActor
from rlcore.compat.areal.workflow import (
    EpisodeEngine,
    LLMRequest,
    LLMResponse,
    ModelRequest,
    ModelResponse,
    RLVRWorkflow,
    RolloutWorkflow,
)

__all__ = [
    "IGNORED",
    "DatasetConfig",
    "EpisodeEngine",
    "FSDPPPOActor",
    "FinetuneSpec",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "LLMRequest",
    "LLMResponse",
    "MicroBatchSpec",
    "ModelRequest",
    "ModelResponse",
    "OptimizerConfig",
    "PPOActorConfig",
    "RLVRWorkflow",
    "RemoteInfEngine",
    "RemoteSGLangEngine",
    "RemotevLLMEngine",
    "RolloutWorkflow",
    "TensorBatch",
    "WeightUpdateMeta",
    "load_expr_config",
]
