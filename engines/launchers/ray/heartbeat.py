"""The heartbeat between the program and an agent: Ray notices a cut link after a minute, a stopped process never."""

from __future__ import annotations

import threading
import time

from rlcore.engines.launchers.ray.agent_link import AgentLink
from rlcore.errors import RlcoreError, first_line

START_S = 120.0
"""How long an agent gets to start, and then waits for the program: Ray starts a process for it, which imports torch."""
LOOK_S = 1.0
"""How often an agent looks at its processes and at its own silence; and a pause of the program between two beats."""
BEAT_S = 2.0
"""How long an agent lets a beat wait while nothing changes: a beat costs the program more than a millisecond."""
SILENCE_S = 10.0
"""Program and agent each take the other for lost when they have not heard of it for so long."""


class Heartbeat:
    """Asks the agent of a link again and again, in a thread, until the host is lost."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        threading.Thread(target=self._run, name=f"rlcore-heartbeat-{link.host}", daemon=True).start()

    def _run(self) -> None:
        while not self._link.why_lost:
            asked = time.monotonic()
            try:
                self._link.beat(SILENCE_S)
            except RlcoreError as error:
                is_silent = time.monotonic() - asked >= SILENCE_S
                self._link.lose(f"it did not answer for {SILENCE_S:g} s" if is_silent else first_line(error))
                return
            time.sleep(LOOK_S)
