from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import rlcore.ops
from tests.warm import run_warm


def test_importing_the_operators_does_not_load_torch(run_python: Any) -> None:
    assert run_python("import sys, rlcore.ops; print('torch' in sys.modules)").stdout == "False\n"


def test_operators_leave_torchs_compiler_alone() -> None:
    """It takes longer to load than torch, and eager code has no use for it."""
    result = run_warm(
        "import sys, torch\n"
        "from rlcore.ops import linear_logprob, linear_loss, ppo_clip, token_logprob\n"
        "print('torch._dynamo' in sys.modules)\n"
        "hidden, weight = (torch.randn(n, 4, requires_grad=True) for n in (6, 9))\n"
        "targets, ones = torch.arange(6), torch.ones(6)\n"
        "batch = {'old_logprobs': -ones, 'advantages': ones}\n"
        "linear_loss(hidden, weight, targets, ppo_clip(), per_token=batch, token_weight=ones).loss.backward()\n"
        "linear_logprob(hidden, weight, targets, with_entropy=True).logprob.sum().backward()\n"
        "token_logprob(hidden @ weight.T, targets).logprob.sum().backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_every_public_name_exists_and_the_list_is_sorted() -> None:
    assert rlcore.ops.__all__ == sorted(rlcore.ops.__all__) == dir(rlcore.ops)
    for name in rlcore.ops.__all__:
        assert getattr(rlcore.ops, name) is not None


def test_the_names_are_all_that_type_checkers_are_given() -> None:
    """An import of another form would be there for them alone."""
    nodes = ast.walk(ast.parse(Path(rlcore.ops.__file__).read_text("utf-8")))
    (block,) = (node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assert sorted(alias.name for node in block.body for alias in node.names) == rlcore.ops.__all__


def test_an_unknown_name_raises_with_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'linear_los'; it offers .*linear_loss"):
        rlcore.ops.linear_los  # noqa: B018


def test_every_function_that_breaks_graphs_is_kept_out_of_them_once_the_compiler_is_loaded() -> None:
    from rlcore.kernels.autograd.compiled import GRAPH_BREAKS
    from rlcore.kernels.autograd.uncompiled import UNCOMPILED

    assert UNCOMPILED.keys() == GRAPH_BREAKS.keys()
    assert all(
        inspect.unwrap(UNCOMPILED[reason]) is inspect.unwrap(function) for reason, function in GRAPH_BREAKS.items()
    )
