"""The heartbeat between the program and an agent: Ray notices a cut link after a minute, a stopped process never."""

from __future__ import annotations

import threading
import time

from rlcore.engines.launchers.ray.agent_link import AgentLink
from rlcore.errors import RlcoreError, first_line

START_S = 120.0
"""How long an agent gets to start, and then waits for the program: Ray starts a process for it, which imports torch."""
LOOK_S = 1.0
"""How often an agent looks at its processes, and at how long it has not heard of the program."""
PAUSE_S = 1.0
"""How long the program waits after an answer before it asks again."""
BEAT_S = 2.0
"""How long an agent lets a beat wait while nothing changes: a beat costs the program more than a millisecond."""
SILENCE_S = 10.0
"""A program or an agent that stands still for so long, and then goes on, is not taken for lost."""
ANSWER_S = BEAT_S + SILENCE_S
"""How long the program waits for the answer to a beat."""
NEXT_BEAT_S = BEAT_S + PAUSE_S + SILENCE_S
"""How long an agent waits for a beat after it has got one."""


class Heartbeat:
    """Asks the agent of a link again and again, in a thread, until the host is lost."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        threading.Thread(target=self._run, name=f"rlcore-heartbeat-{link.host}", daemon=True).start()

    def _run(self) -> None:
        while not self._link.why_lost:
            asked = time.monotonic()
            try:
                self._link.beat(ANSWER_S)
            except RlcoreError as error:
                is_silent = time.monotonic() - asked >= ANSWER_S
                self._link.lose(f"it did not answer for {ANSWER_S:g} s" if is_silent else first_line(error))
                return
            time.sleep(PAUSE_S)
