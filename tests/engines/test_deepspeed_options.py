"""Options of the executor ``deepspeed`` and its package are checked before any worker starts."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.deepspeed.executor import checked_optimizer
from rlcore.engines.deepspeed.library import check_installed
from rlcore.engines.deepspeed.options import ZeroOptions
from rlcore.engines.deepspeed.zero import Zero
from rlcore.errors import InvalidInputError, MissingDependencyError, UnsupportedError

from .train_policy import Regression, regression_weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0}, "stage must be 1, 2 or 3, the stage of ZeRO, got 0"),
        ({"stage": "3"}, "stage must be 1, 2 or 3, the stage of ZeRO, got '3'"),
        ({"compute_dtype": "float16"}, "compute_dtype must be one of float32, bfloat16, got 'float16'"),
        ({"overlap_comm": 1}, "overlap_comm must be True or False, got 1"),
        ({"bucket_elements": 0}, "bucket_elements must be a whole number of at least 1, got 0"),
        ({"persist_below": -1}, "persist_below must be a whole number of at least 0, got -1"),
        ({"config": []}, "config must be a dict of DeepSpeed's keys, got list"),
        ({"config": {"zero_optimization": 3}}, r"config\['zero_optimization'\] must be a dict, got int"),
        ({"config": {"gradient_clipping": 1.0}}, "may not have 'gradient_clipping': it is train_batch"),
        ({"config": {"zero_optimization": {"stage": 2}}}, r"\['zero_optimization'\] may not have 'stage': it is the"),
        ({"stages": 3}, "has no option 'stages'; did you mean 'stage'"),
    ],
)
def test_options_that_are_wrong_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with rlcore.meta_device():
        module = Regression(regression_weights())
    engine = rlcore.TrainEngine(module, executor="deepspeed")
    with pytest.raises(InvalidInputError, match=message):
        engine.build(devices="cpu", **options)


def test_bfloat16_at_stage_1_names_stage_2() -> None:
    with pytest.raises(UnsupportedError, match=r"compute_dtype='bfloat16' with stage=1 .*use stage=2"):
        ZeroOptions(stage=1, compute_dtype="bfloat16")


def test_keys_of_the_users_own_join_those_of_the_executor() -> None:
    options = ZeroOptions(stage=2, config={"wall_clock_breakdown": True, "zero_optimization": {"use_all": 1}})
    config = options.deepspeed_config(100)
    assert config["wall_clock_breakdown"] and config["managed_gradient_accumulation"] is False
    assert config["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 100,
        "sub_group_size": 100,
        "use_all": 1,
    }


def test_a_missing_or_an_old_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingDependencyError, match=r"'deepspeed'; run: pip install 'rlcore\[deepspeed\]'"):
        check_installed()
    for version in ("0.19.7", "0.9"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        with pytest.raises(UnsupportedError, match=f"DeepSpeed {version} .*at least 0.19.8; run: .*pip install"):
            check_installed()
    for version in ("0.19.8", "0.20.0+cu130", "1.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        check_installed()


class TwoOptimizers(Regression):
    def on_weights_materialized(self) -> None:
        self.first, self.second = (torch.optim.SGD([one], lr=0.1) for one in (self.mix.weight, self.mix.bias))


class LeavesOneOut(Regression):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.mix.parameters(), lr=0.1)


class Adagrad(Regression):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.Adagrad(self.parameters())


class Adafactor(Regression):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.Adafactor(self.parameters())


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        (TwoOptimizers, "the optimizers first, second of TwoOptimizers .*DeepSpeed shards one"),
        (LeavesOneOut, r"1 parameters of LeavesOneOut that no optimizer has, the first of them embed\.weight,"),
        (Adagrad, r"torch\.optim\.Adagrad as the optimizer of Adagrad"),
        (Adafactor, r"torch\.optim\.Adafactor as .* flat parts of a group; use another optimizer"),
    ],
)
def test_optimizers_that_zero_cannot_shard_are_refused(module_class: Any, message: str) -> None:
    module = module_class(regression_weights())
    module.on_weights_materialized()
    with pytest.raises(UnsupportedError, match=message):
        checked_optimizer(module)


def test_a_closure_is_refused_and_not_forgotten() -> None:
    module = LeavesOneOut(regression_weights())
    module.on_weights_materialized()
    zero = Zero.__new__(Zero)
    zero.module, zero._is_stepping = module, False
    zero._take_over(module.optimizer)
    with pytest.raises(UnsupportedError, match=r"step\(closure\) .* of LeavesOneOut .* without a closure"):
        module.optimizer.step(lambda: 0.0)
