"""No test compares floating-point numbers by a limit that somebody typed: tests/accuracy.py derives them.

Nor is what it derives them from made up: sums of a hundred terms and more have their number from a shape, and a factor
is the magnitude of something.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CONFORMANCE = TESTS.parent / "rlcore" / "conformance"
RULE = {"accuracy.py", "test_accuracy.py", "test_tolerances.py"}
TOLERANCES = {"rtol", "atol", "rel", "abs"}
SMALL = 1e-3  # what is compared with less is an error of rounding, not seconds, bytes or shares
MANY = 100  # terms that nobody counts by hand


def typed_tolerances(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of ``assert_close``, of ``allclose``, of literal tolerances and of ``error < 2e-5``.

    Also of ``terms=1000``, of ``rounding(1000)``, of ``20 * rounding(n)`` and of ``x > y - 1e-3``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _last_name(node.func)
            typed = any(k.arg in TOLERANCES and _is_small(k.value) for k in node.keywords)
            counts = [k.value for k in node.keywords if k.arg == "terms"] + node.args[: name == "rounding"]
            many = any(isinstance(count, ast.Constant) and count.value >= MANY for count in counts)
            if name in ("assert_close", "allclose") or (typed and name != "gradcheck") or many:
                yield node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = node.left, node.right
            yield from [node.lineno] * (
                any(map(_is_rounding, sides)) and any(isinstance(x, ast.Constant) for x in sides)
            )
        elif isinstance(node, ast.Compare) and isinstance(node.ops[-1], (ast.Gt, ast.GtE)):
            last = node.comparators[-1]
            yield from [node.lineno] * (
                isinstance(last, ast.BinOp) and isinstance(last.op, ast.Sub) and _is_small(last)
            )
        elif isinstance(node, ast.Compare) and isinstance(node.ops[-1], (ast.Lt, ast.LtE)):
            yield from [node.lineno] * _is_small(node.comparators[-1])


def _is_small(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Constant) and isinstance(part.value, float) and 0 < part.value <= SMALL
        for part in ast.walk(node)
    )


def _is_rounding(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) == "rounding"


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_no_test_has_a_typed_tolerance() -> None:
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}"
        for path in sorted([*TESTS.rglob("*.py"), *CONFORMANCE.rglob("*.py")])
        if path.name not in RULE
        for line in typed_tolerances(ast.parse(path.read_text("utf-8")))
    ]
    assert not found, f"use tests/accuracy.py, or derive the limit beside it: {', '.join(found)}"


@pytest.mark.parametrize(
    "code",
    [
        "torch.testing.assert_close(a, b)",
        "assert torch.allclose(a, b)",
        "assert a == pytest.approx(b, rel=1e-5)",
        "compare(a, b, atol=2 * 1e-6)",
        "assert error < 2e-5",
        "assert (a - b).abs().max() <= 1e-6 * scale",
        "assert logprob > logprobs.max() - 1e-3",
        "assert_within_rounding(a, b, terms=1000)",
        "assert error < scale * rounding(1000)",
        "assert error < 20 * rounding(hidden)",
        "LIMIT = rounding(hidden) * 20",
    ],
)
def test_a_typed_tolerance_is_found(code: str) -> None:
    assert list(typed_tolerances(ast.parse(code))) == [1]


@pytest.mark.parametrize(
    "code",
    [
        "assert_within_rounding(a, b, terms=3)",
        "assert_within_rounding(a, b, terms=V + 16)",
        "assert error < largest * rounding(V)",
        "assert seconds > before - 2",
        "assert a == pytest.approx(b, rel=rounding(12))",
        "assert a == pytest.approx(b)",
        "assert seconds < 0.5",
        "optimizer = SGD(parameters, lr=1e-4)",
        "gradcheck(f, inputs, atol=1e-5)",
    ],
)
def test_other_numbers_are_not(code: str) -> None:
    assert not list(typed_tolerances(ast.parse(code)))
