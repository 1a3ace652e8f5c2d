"""The rendezvous store as a rank sees it: a torch.distributed Store whose content lives with the daemon.

`request` sends one StoreRequest and returns its reply; it raises ConnectionError or TimeoutError when there is no answer. The
request is then repeated with the same request_id until the daemon is back (at most `away_limit_s`), so the far side must
answer a repeated id with its first answer and not act twice. Time without a daemon does not count as the user's timeout.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from tmd.protocol.agent import StoreReply, StoreRequest

#: How often a key that is not there yet is asked for again: fast at first, then at most this slow.
POLL_MAX_S = 0.1
_POLL_MIN_S = 0.002
#: How often a wait for the daemon is said again.
NOTICE_S = 10.0

_log = logging.getLogger(__name__)

#: Unique in this process: an id that is used again would get the first answer again.
_numbers = itertools.count(1)
#: C++ wrappers such as PrefixStore keep the C++ half of a Python store alive, but not the Python half that they call.
_alive: list[AgentStore] = []


class AgentStore(Store):
    """Thread-safe if `request` is. Works under PrefixStore. Lives until the process ends."""

    def __init__(
        self,
        request: Callable[[StoreRequest], StoreReply],
        incarnation: str,
        *,
        timeout: datetime.timedelta = datetime.timedelta(minutes=5),
        away_limit_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._request = request
        self._incarnation = incarnation
        self._away_limit_s = away_limit_s
        _alive.append(self)

    # ---------------------------------------------------------------- what torch.distributed calls

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value=_as_bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises DistStoreError after the store's timeout."""
        found: StoreReply | None = None

        def there() -> bool:
            nonlocal found
            reply = self._ask("get", key)
            found = reply if reply.found else None
            return reply.found

        self._await([key], there, self._limit())
        assert found is not None
        return found.value

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount=amount).number

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """As torch's stores: sets if the key holds `expected`, or is new and `expected` is empty; returns what it holds then,
        or `expected` if it is not there."""
        reply = self._ask("compare_set", key, value=_as_bytes(value), expected=_as_bytes(expected))
        return reply.value if reply.found else _as_bytes(expected)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", keys=tuple(keys)).found

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Raises DistStoreError after `timeout` (None: the store's)."""
        self._await(keys, lambda: self.check(keys), timeout or self._limit())

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key).found

    def num_keys(self) -> int:
        return self._ask("num_keys").number

    # The names under which C++ looks these two up.
    deleteKey = delete_key
    getNumKeys = num_keys

    # ---------------------------------------------------------------- waiting

    def _limit(self) -> datetime.timedelta:
        """The store's timeout; it lives in the C++ half, where wrappers change it."""
        limit: datetime.timedelta = self.timeout  # type: ignore[attr-defined]
        return limit

    def _await(self, keys: Sequence[str], there: Callable[[], bool], timeout: datetime.timedelta) -> None:
        pause_s = _POLL_MIN_S
        left_s = timeout.total_seconds()
        while not there():
            if left_s <= 0:
                names = ", ".join(keys)
                raise DistStoreError(
                    f"waited {timeout.total_seconds():g} s for the key {names}, which no rank has set: is another rank still on "
                    "its way to the same new_group or barrier?"
                )
            time.sleep(min(pause_s, left_s))
            left_s -= pause_s
            pause_s = min(2 * pause_s, POLL_MAX_S)

    def _ask(self, operation: Any, key: str = "", **fields: Any) -> StoreReply:
        """One request and its answer, repeated while the daemon is away."""
        number = next(_numbers)
        request = StoreRequest(request_id=number, incarnation=self._incarnation, operation=operation, key=key, **fields)
        began_s = time.monotonic()
        said_s = began_s - NOTICE_S
        pause_s = _POLL_MIN_S
        while True:
            try:
                reply = self._request(request)
            except (ConnectionError, TimeoutError) as error:
                now_s = time.monotonic()
                if now_s - began_s >= self._away_limit_s:
                    raise DistStoreError(
                        f"store {operation} {key}: waited {self._away_limit_s:g} s for the daemon, which did not come back "
                        f"({error}); is `tmd` running on the head node?"
                    ) from error
                if now_s - said_s >= NOTICE_S:
                    _log.warning("waiting for the daemon: store %s %s (%s)", operation, key, error)
                    said_s = now_s
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, POLL_MAX_S)
                continue
            if reply.error:
                raise DistStoreError(f"store {operation} {key}: {reply.error}")
            return reply


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
