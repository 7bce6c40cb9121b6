"""Ctrl-C within ``Interrupt``: the first asks, the second ends, whatever is raised on its way out."""

from __future__ import annotations

import contextlib
import signal

import pytest

from rlcore.errors import StateError
from rlcore.quickstart.interrupt import Interrupt, Interrupted


def press(interrupt: Interrupt, times: int) -> None:
    interrupt.begin_steps()
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_the_first_ctrl_c_asks_and_an_error_after_it_stays_what_it_is() -> None:
    said: list[str] = []
    with pytest.raises(StateError, match="planted"), Interrupt(said.append) as interrupt:
        press(interrupt, 1)
        assert interrupt.is_requested
        raise StateError("planted")
    assert said == ["stopping after this step; press Ctrl-C again to stop at once"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # it is Python's own again


def test_an_error_of_what_the_second_ctrl_c_interrupts_is_told_and_does_not_hide_it() -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt) as raised, Interrupt(said.append) as interrupt:
        try:
            press(interrupt, 2)
        finally:
            raise StateError("planted")
    assert isinstance(raised.value.__cause__, StateError)
    assert said[1:] == ["what was interrupted ended with StateError: planted"]


def test_an_error_long_after_a_ctrl_c_that_a_destructor_swallowed_stays_what_it_is() -> None:
    with pytest.raises(StateError, match="planted"), Interrupt(lambda _: None) as interrupt:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupt.begin_steps()
        raise StateError("planted")


def test_a_run_that_stops_between_steps_has_stopped_so_though_a_second_ctrl_c_came() -> None:
    with pytest.raises(Interrupted), Interrupt(lambda _: None) as interrupt:
        try:
            press(interrupt, 2)
        except KeyboardInterrupt:  # as Python does in a destructor
            raise Interrupted from None
