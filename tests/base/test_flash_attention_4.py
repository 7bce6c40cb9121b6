"""FlashAttention 4 is called by its conventions, has its gradients, and is one operator to the compiler."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accuracy import assert_same_bits
from tests.base.flash_4_stand_in import FlashAttention4

pytest.importorskip("transformers")

from rlcore.packed import choice, flash_4  # they import transformers
from rlcore.packed.attention_call import AttentionCall
from rlcore.packed.implementations import PackedSequences

CPU = torch.device("cpu")
LENGTHS = (1, 13, 4, 30)
CALLS = {
    "plain": AttentionCall(4, 2, 16, 16),
    "window": AttentionCall(4, 2, 16, 16, window=4),
    "softcap": AttentionCall(4, 4, 16, 16, softcap=1.0),
    "sinks": AttentionCall(4, 2, 16, 16, has_sinks=True),
    "narrow values": AttentionCall(4, 4, 24, 16),
}


def operands(*, has_sinks: bool = False, dtype: torch.dtype = torch.float64) -> list[Any]:
    """The operator's, for ``LENGTHS``."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(LENGTHS), heads, 16) for heads in (4, 2, 2)]
    qkv = [torch.randn(*size, generator=generator, dtype=dtype, requires_grad=True) for size in sizes]
    sinks = torch.randn(4, generator=generator, dtype=dtype, requires_grad=True) if has_sinks else None
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return [*qkv, cu_seqlens, max(LENGTHS), 0.25, 7 if has_sinks else None, 0.0, sinks]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_it_computes_attention_and_its_gradients(call: str, dtype: torch.dtype, flash_attn_4: FlashAttention4) -> None:
    """By the probe, which compares both with plain torch and finds what is left out (see test_packed_attention)."""
    assert choice.why_not("flash_attention_4", CALLS[call], CPU, dtype) is None
    assert flash_attn_4.deterministic == [False]


@pytest.mark.parametrize("has_sinks", [False, True])
def test_its_operator_is_one_as_torch_demands(has_sinks: bool, flash_attn_4: FlashAttention4) -> None:
    """Schema, fake tensors, autograd, and all of it in a graph of changing sizes."""
    torch.library.opcheck(flash_4._attend, tuple(operands(has_sinks=has_sinks)))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_gradient_of_each_tensor_is_its_own(has_sinks: bool, flash_attn_4: FlashAttention4) -> None:
    inputs = operands(has_sinks=has_sinks)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]

    def output(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        found: Tensor = flash_4._attend(*(next(given) if any(x is leaf for leaf in leaves) else x for x in inputs))[0]
        return found

    assert len(leaves) == 3 + has_sinks
    assert torch.autograd.gradcheck(output, leaves, fast_mode=True)


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_a_compiled_layer_has_it_in_its_graph(flash_attn_4: FlashAttention4) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        return flash_4.attend_flash_4(None, query * 2, key, value, packed, scaling=0.25, sliding_window=5) + 1

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for lengths in ((5, 9), (4, 7, 8), (40,), (2, 3)):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSequences(cu_seqlens, lengths, lambda *_: "")
        shapes = [(1, heads, sum(lengths), 16) for heads in (4, 2, 2)]
        qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
        found, expected = compiled(*qkv, packed), attend(*qkv, packed)
        assert_same_bits(found, expected)
        grad = torch.randn_like(found)
        for one, other in zip(*(torch.autograd.grad(x, qkv, grad) for x in (found, expected)), strict=True):
            assert_same_bits(one, other)
    torch.compiler.reset()


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_deterministic_where_torch_is(
    asked: bool, flash_attn_4: FlashAttention4, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked)
    flash_4._attend(*operands())[0].sum().backward()
    assert flash_attn_4.deterministic == [asked]


def test_it_is_refused_where_it_cannot_run(flash_attn_4: FlashAttention4, monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = AttentionCall(4, 2, 16, 16, has_dropout=True)
    assert choice.why_not("flash_attention_4", dropout, CPU, torch.float32) == "it has no dropout"
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):  # as if a package were broken
        monkeypatch.setitem(sys.modules, name, None)
    reason = choice.why_not("flash_attention_4", AttentionCall(6, 2, 16, 16), CPU, torch.float32)
    assert reason is not None and reason.startswith("its probe failed: ModuleNotFoundError: import of flash_attn")
    monkeypatch.undo()
    assert choice.why_not("flash_attention_4", dropout, CPU, torch.float32) == (
        "the package flash-attn-4 is not installed for this device"
    )


@pytest.mark.slow
def test_the_package_has_what_is_called(tmp_path: Path) -> None:
    """Its own wheel is read, which needs no GPU: the stand-in has no argument that the package lacks."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    found = subprocess.run([*pip, "flash-attn-4>=4.0.0b36"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"pip reaches no index: {found.stderr.strip().splitlines()[-1]}")
    (wheel,) = tmp_path.glob("*.whl")
    source = zipfile.ZipFile(wheel).read("flash_attn/cute/interface.py")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        called = set(inspect.signature(getattr(FlashAttention4, name)).parameters) - {"self"}
        assert called <= {argument.arg for argument in functions[name].args.args}
    order = [argument.arg for argument in functions["_flash_attn_bwd"].args.args[:6]]
    assert order == ["q", "k", "v", "out", "dout", "lse"]
