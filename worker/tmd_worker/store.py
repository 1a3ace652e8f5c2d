"""The rendezvous store as a rank sees it: a torch.distributed Store whose content lives with the daemon.

`request` sends one StoreRequest and returns its reply; it raises ConnectionError or TimeoutError when there is no answer. The
request is then repeated with the same request_id until the daemon is back (at most `away_limit_s`), so the far side must
answer a repeated id with its first answer and not act twice. Time without a daemon does not count as the user's timeout.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch.distributed as dist

from tmd.protocol.agent import StoreReply, StoreRequest


class AgentStore(dist.Store):
    """Thread-safe if `request` is. Works under PrefixStore."""

    def __init__(
        self,
        request: Callable[[StoreRequest], StoreReply],
        incarnation: str,
        *,
        timeout: datetime.timedelta = datetime.timedelta(minutes=5),
        away_limit_s: float = 600.0,
    ) -> None:
        super().__init__()
