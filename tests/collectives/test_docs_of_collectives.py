"""docs/collectives.md says what the code does: its table of operators, and its examples, run on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.devices.collectives import TorchCollectives
from rlcore.registry import get_device
from tests.collectives.test_reductions import by_spec

PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
GROUP, CONTAINERS = re.findall(r"^```python\n(from rlcore.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def in_words(collectives: TorchCollectives, op: str) -> str:
    """How it reduces those native dtypes for which it is defined."""
    dtypes = sorted(collectives.native_dtypes, key=str)
    support = {dtype: collectives.reduction(op, dtype).support for dtype in dtypes}
    native, emulated = ([dtype for dtype in dtypes if support[dtype] == how] for how in ("native", "emulated"))
    if not native or not emulated:
        return "native" if native else "emulated"
    if not any(dtype.is_floating_point for dtype in emulated):
        return "native for floats"
    if all(dtype.is_floating_point for dtype in emulated) and not any(dtype.is_floating_point for dtype in native):
        return "native for integers"
    return f"native but for {', '.join(str(dtype).removeprefix('torch.') for dtype in emulated)}"


def test_the_table_of_operators() -> None:
    libraries = by_spec("gloo"), by_spec("nccl")
    rows = re.findall(r"^\| `([a-z_ ]+)` \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    told = {op: cells for ops, *cells in rows for op in ops.split()}
    assert told == {op: [in_words(library, op) for library in libraries] for op in libraries[0].reduce_ops()}


def follow(rank: Any, group_code: str, containers_code: str) -> dict[str, Any]:
    """Return what the examples leave behind, as lists."""
    mine = float(rank.rank)
    names: dict[str, Any] = {
        "torch": torch,
        "rank": rank.rank,
        "tensor": torch.full((2,), mine),
        "rows": torch.full((2, 2), mine),
        "for_rank_0": torch.tensor([mine]),
        "for_rank_1": torch.tensor([mine + 10]),
    }
    exec(group_code.replace('"cuda:0"', f'"cpu:{rank.rank}"').replace("/run/user/1000/my-job", str(rank.folder)), names)
    found = {name: names[name].tolist() for name in ("tensor", "mine")}
    found |= {name: [part.tolist() for part in names[name]] for name in ("parts", "received")}
    names |= {"group": rank.group("cpu", 2), "tree": {"x": torch.full((1,), mine + 5)}}
    names |= {name: torch.full((1 + rank.rank,), mine) for name in ("ids", "logprobs")}
    names |= dict.fromkeys(("loss", "kept", "dropped"), torch.tensor(mine))
    exec(containers_code, names)
    return found | {"trees": [tree.tolist() for tree in names["trees"]], "tree": names["tree"]["x"].tolist()}


def test_the_examples(on_ranks: Any) -> None:
    for rank, found in enumerate(on_ranks(follow, 2, GROUP, CONTAINERS)):
        assert found.pop("tensor") == [1.0, 1.0]  # the mean of 0 and 1 is 0.5; source 0 broadcasts it; then their sum
        assert found.pop("parts") == [[[0.0, 0.0]] * 2, [[1.0, 1.0]] * 2]
        assert found.pop("mine") == [[1.0, 1.0]]
        assert found.pop("received") == found.pop("trees") == [[10.0 * rank], [10.0 * rank + 1]]
        assert found == {"tree": [5.0]}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_device_can_do(device: str) -> None:
    collectives = get_device(device).collectives
    assert collectives.reduce_ops()["avg"].support == "native"
    emulated = collectives.dtypes()[torch.float8_e4m3fn]
    assert (emulated.support, emulated.reason) == ("emulated", f"{collectives.backend} has no sum of float8_e4m3fn")
    refused = collectives.reduction("band", torch.float32)
    assert (refused.support, refused.reason) == ("unsupported", "bits are of integers and bool")
