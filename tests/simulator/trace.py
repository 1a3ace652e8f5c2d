"""What a run prints when it is replayed: one line per thing worth knowing, with time and who."""

from __future__ import annotations


class Trace:
    """Collects or prints lines; off by default, since formatting costs more than simulating."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on

    def line(self, now: float, who: str, text: str) -> None:
        if self.on:
            print(f"{now:9.4f}  {who:<14} {text}")
