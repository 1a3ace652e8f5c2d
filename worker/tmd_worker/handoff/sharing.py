"""Who moves which chunks of a state that several sources hold. Pure: numbers of chunks and of readers, and the caller's clock.

Contract: a chunk is held by one reader at most until it has landed. Chunks are dealt when they are asked for, in order, so each
source serves as much as its speed allows and nothing is planned that a slow one could upset. What a reader gives back goes to
the next that asks. A reader that still holds chunks when another has had nothing to do for `patience_s` is to be given up: its
chunks go to the others, and it gets no more. So all bytes land while one reader is left that moves any, and the last chunks of
a slow or dead source cost `patience_s`, not its deadline.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence


class Sharing:
    """See the module's contract. Moments are seconds of one clock that never goes back."""

    def __init__(self, chunks: Sequence[int], patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting = collections.deque(chunks)
        #: Of each reader: what it holds, when it last took something, and since when it has had nothing to do.
        self._held: dict[int, set[int]] = {}
        self._took_s: dict[int, float] = {}
        self._idle_since_s: dict[int, float] = {}
        self._given_up: set[int] = set()

    def join(self) -> int:
        """The number of one more reader."""
        reader = len(self._held)
        self._held[reader] = set()
        return reader

    def take(self, reader: int, now_s: float) -> int | None:
        """The next chunk for this reader to move. None: there is none now; see `over`."""
        if reader in self._given_up:
            return None
        if not self._waiting:
            if not self._held[reader]:
                self._idle_since_s.setdefault(reader, now_s)
            return None
        self._idle_since_s.pop(reader, None)
        self._took_s[reader] = now_s
        chunk = self._waiting.popleft()
        self._held[reader].add(chunk)
        return chunk

    def landed(self, reader: int, chunk: int) -> None:
        self._held[reader].remove(chunk)

    def give_back(self, reader: int, chunk: int) -> None:
        self._held[reader].remove(chunk)
        self._waiting.appendleft(chunk)

    def over(self, reader: int) -> bool:
        """Nothing will come for this reader any more."""
        return reader in self._given_up or not (self._waiting or self._under_way)

    def overdue(self, reader: int, now_s: float) -> list[int]:
        """Whom this idle reader need not wait for any longer: it is to be closed, so that it gives back what it holds. Each is
        named once."""
        late = [other for other in self._holders(reader) if self._due_s(reader, other) <= now_s]
        self._given_up.update(late)
        return late

    def next_due_s(self, reader: int) -> float | None:
        """When `overdue` may have somebody for this reader. None: it waits for nobody but itself, or for who is given up."""
        return min((self._due_s(reader, other) for other in self._holders(reader)), default=None)

    @property
    def missing(self) -> int:
        """How many chunks have not landed."""
        return len(self._waiting) + self._under_way

    @property
    def _under_way(self) -> int:
        return sum(len(chunks) for chunks in self._held.values())

    def _holders(self, reader: int) -> list[int]:
        """Those that this reader waits for, while it has nothing to do itself."""
        if reader not in self._idle_since_s or reader in self._given_up:
            return []
        return [other for other, chunks in self._held.items() if chunks and other != reader and other not in self._given_up]

    def _due_s(self, reader: int, other: int) -> float:
        return max(self._idle_since_s[reader], self._took_s[other]) + self._patience_s
