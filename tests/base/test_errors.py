"""The exception tree: what can be caught as what, and what the messages say."""

from __future__ import annotations

import inspect

import pytest

from rlcore import errors
from rlcore.errors import MissingDependencyError, RlcoreError, UnsupportedError, WorkerError

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind is not RlcoreError]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_an_rlcore_error_and_is_in_the_drawn_tree(kind: type) -> None:
    assert issubclass(kind, RlcoreError)
    assert f"── {kind.__name__} " in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        (errors.InvalidInputError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.MissingDependencyError, ImportError),
        (errors.TorchImportError, ImportError),
    ],
)
def test_error_can_be_caught_as_the_standard_one(kind: type, standard: type) -> None:
    assert issubclass(kind, standard)


def test_unsupported_says_what_and_why() -> None:
    error = UnsupportedError("graph capture on cpu:0", "there is no graph")
    assert str(error) == "graph capture on cpu:0 is not supported: there is no graph"
    assert (error.feature, error.reason) == ("graph capture on cpu:0", "there is no graph")


def test_missing_dependency_says_the_pip_command() -> None:
    error = MissingDependencyError("vllm", needed_for="executor 'vllm'", extra="vllm")
    assert str(error) == "executor 'vllm' needs the package 'vllm'; run: pip install 'rlcore[vllm]'"
    assert error.package == "vllm"


def test_a_failed_import_of_torch_names_what_is_behind_it_and_the_command() -> None:
    cause = RuntimeError("no back end acme")
    told = "import torch failed: RuntimeError: no back end acme; `rlcore doctor` says what to do"
    assert str(errors.TorchImportError(cause)) == told
    cause.__cause__ = OSError("libacme.so")
    told = "import torch failed: RuntimeError: no back end acme (OSError: libacme.so); `rlcore doctor` says what to do"
    assert str(errors.TorchImportError(cause)) == told


def test_an_error_in_one_line_has_its_type_and_the_begin_of_its_text() -> None:
    assert errors.one_line(KeyError("planted")) == "KeyError: 'planted'"
    assert errors.one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    compiled = RuntimeError("C++ compile error\n\nCommand:\n g++ ...\n\nYou can suppress this exception by ...")
    assert errors.one_line(compiled).startswith("RuntimeError: C++ compile error Command: g++")
    assert len(errors.one_line(ValueError("x" * 10_000))) < 400

    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert errors.one_line(UnprintableError()) == "UnprintableError: <its text cannot be had: ValueError('no text')>"


def test_worker_error_says_where_and_carries_the_traceback() -> None:
    traceback = "Traceback (most recent call last):\n  ...\nZeroDivisionError: division by zero\n"
    told = "ZeroDivisionError: division by zero"
    error = WorkerError(rank=3, device="cuda:1", method="train_step", error=told, traceback=traceback)
    first, *rest = str(error).splitlines()
    assert first == "train_step() failed on rank 3 (cuda:1): ZeroDivisionError: division by zero"
    assert rest == ["", *traceback.rstrip().splitlines()]
    assert (error.rank, error.device, error.method, error.traceback) == (3, "cuda:1", "train_step", traceback)
