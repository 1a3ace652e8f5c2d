"""Many links at once: the higher rank of a pair dials, the lower one takes what its listener has accepted."""

from __future__ import annotations

import collections
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from tmd.protocol.membership import Member
from tmd_worker.transport.connection import Connection
from tmd_worker.transport.dialing import Cancelled, CannotConnect, LinkError, Unreached, dial
from tmd_worker.transport.handshake import ASKING, LINK, Hello, Verdict, new_nonce
from tmd_worker.transport.labels import OWN, USE, Labels
from tmd_worker.transport.segment import Offer

#: Pauses between attempts at a peer that has not heard of the epoch yet.
RETRY_FIRST_S = 0.001
RETRY_MAX_S = 0.02
#: Who waits to be dialed asks after this long, and then ever less often, whether the peer has left the group.
ASK_FIRST_S = 0.05
ASK_MAX_S = 2.0
#: Then it listens again, whatever has become of the question.
_ASKING_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class LinkRequest:
    """A link that must exist: in which group, to which global rank, and who holds that rank. `shares`: through memory, if both
    ends are on one host and can."""

    group: str
    peer: int
    member: Member
    shares: bool = False


class Attempt:
    """One opening of links, which another thread may cancel; what it waits for then ends with Cancelled."""

    def __init__(self, epoch: int, deadline_s: float) -> None:
        self.epoch = epoch
        #: A moment of time.monotonic().
        self.deadline_s = time.monotonic() + deadline_s
        self._changed = threading.Condition()
        self._cancelled: str | None = None
        self._dialing: socket.socket | None = None
        #: The peer that is being dialed and has not answered yet, -1 for none.
        self.unreached = -1
        #: Groups that a member has left, and the rank that destroyed them.
        self.gone: dict[str, int] = {}

    def cancel(self, reason: str) -> None:
        with self._changed:
            self._cancelled = reason
            if self._dialing is not None:
                _shutdown(self._dialing)
            self._changed.notify_all()

    def check(self) -> None:
        """Raises Cancelled."""
        if self._cancelled is not None:
            raise Cancelled(f"the links of epoch {self.epoch} are not wanted any more: {self._cancelled}")

    def pause(self, seconds: float) -> None:
        """Raises Cancelled as soon as that is so."""
        with self._changed:
            if self._cancelled is None:
                self._changed.wait(seconds)
        self.check()

    def dialing(self, sock: socket.socket) -> None:
        """This socket is about to block; cancel() shuts it down. Raises Cancelled if it came too late."""
        with self._changed:
            self.check()
            self._dialing = sock

    def learn(self, request: LinkRequest, verdict: Verdict) -> None:
        """The peer has left the group."""
        self.lose(request.group, request.peer if verdict.by == OWN else verdict.by)

    def lose(self, group: str, by: int) -> None:
        """Rank `by` has destroyed the group, of which this is the label or that of a use of it."""
        self.gone[group.partition(USE)[0]] = by

    def forget_socket(self) -> None:
        with self._changed:
            self._dialing = None


class Attempts:
    """The attempts of a process that are under way, so that closing an epoch or dropping a plan ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Attempt -> plan (0: not for a plan).
        self._under_way: dict[Attempt, int] = {}

    @contextmanager
    def attempting(self, attempt: Attempt, plan_id: int, *, closed_epoch: Callable[[], int]) -> Iterator[None]:
        """Raises Cancelled if the epoch was closed before this began."""
        with self._lock:
            if attempt.epoch <= closed_epoch():
                raise Cancelled(f"epoch {attempt.epoch} is closed")
            self._under_way[attempt] = plan_id
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[attempt]

    def __len__(self) -> int:
        return len(self._under_way)

    def cancel_epochs(self, up_to: int, reason: str) -> None:
        with self._lock:
            doomed = [attempt for attempt in self._under_way if attempt.epoch <= up_to]
        for attempt in doomed:
            attempt.cancel(reason)

    def unreached(self, epoch: int) -> int:
        """The rank that is being dialed for this epoch and has not answered yet, -1 for none."""
        with self._lock:
            dialed = [attempt.unreached for attempt, plan in self._under_way.items() if attempt.epoch == epoch and not plan]
        return max(dialed, default=-1)

    def cancel_plan(self, plan_id: int) -> None:
        with self._lock:
            doomed = [attempt for attempt, plan in self._under_way.items() if plan == plan_id]
        for attempt in doomed:
            attempt.cancel(f"plan {plan_id} was dropped")


class Inbox:
    """Connections that the listener has accepted as links and nobody has taken yet. A newer one replaces an older one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._connections: dict[tuple[str, int, int, str], tuple[Hello, Connection]] = {}
        self._closed_epoch = -1
        #: The last flip: (epoch before, epoch after).
        self._flip = (-1, -1)

    def put(self, connection: Connection, hello: Hello) -> None:
        with self._changed:
            before, after = self._flip
            counted = msgspec.structs.replace(hello, epoch=after) if hello.epoch == before else hello
            key = (counted.group, counted.epoch, counted.rank, counted.incarnation)
            _, useless = self._connections.pop(key, (hello, None))
            if hello.epoch > self._closed_epoch:
                self._connections[key] = counted, connection
                self._changed.notify_all()
            else:
                useless = connection  # closed since it was judged
        if useless is not None:
            useless.close()

    def take(self, request: LinkRequest, attempt: Attempt, patience_s: float) -> Connection | None:
        """Waits for the peer to dial; None if it has not within `patience_s`. Raises LinkError or Cancelled."""
        key = (request.group, attempt.epoch, request.peer, request.member.incarnation)
        until_s = time.monotonic() + patience_s
        with self._changed:
            while key not in self._connections:
                attempt.check()
                left_s = attempt.deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LinkError(
                        f"rank {request.peer} ({request.member.incarnation} on {request.member.node}) did not open its link of "
                        f"group {request.group} in time; if it lives, a firewall may drop what it sends to this rank's port",
                        request.peer,
                    )
                patience_s = until_s - time.monotonic()
                if patience_s <= 0:
                    return None
                self._changed.wait(min(left_s, patience_s))
            return self._connections.pop(key)[1]

    def claim(self, group: str) -> list[tuple[Hello, Connection]]:
        """Takes out what others have dialed for this group, whatever the use."""
        with self._changed:
            keys = [key for key in self._connections if key[0].partition(USE)[0] == group]
            return [self._connections.pop(key) for key in keys]

    def flip(self, before: int, after: int) -> None:
        """What a stayer has dialed, or is dialing, under the old number counts under the new one."""
        with self._changed:
            self._flip = (before, after)
            for group, _, rank, incarnation in [key for key in self._connections if key[1] == before]:
                hello, connection = self._connections.pop((group, before, rank, incarnation))
                counted = msgspec.structs.replace(hello, epoch=after)
                self._connections.setdefault((group, after, rank, incarnation), (counted, connection))
            self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks again at whether it was cancelled."""
        with self._changed:
            self._changed.notify_all()

    def close(self, epoch: int) -> None:
        """Drops what nobody took for epochs up to this one."""
        with self._changed:
            self._closed_epoch = max(self._closed_epoch, epoch)
            stale = [self._connections.pop(key)[1] for key in list(self._connections) if key[1] <= epoch]
            self._changed.notify_all()
        for connection in stale:
            connection.close()

    def drop(self, epoch: int, incarnation: str) -> None:
        """Drops what one incarnation opened for one epoch."""
        with self._changed:
            stale = [self._connections.pop(key)[1] for key in list(self._connections) if (key[1], key[3]) == (epoch, incarnation)]
        for connection in stale:
            connection.close()


class Opener:
    """Opens links for one process; those to members whose address is `nearby_host` without the network, if that is possible.
    `shares`: some of those through memory. `labels` tells which groups are over here."""

    def __init__(
        self, incarnation: str, key: bytes, inbox: Inbox, labels: Labels, nearby_host: str | None, *, shares: bool
    ) -> None:
        self._labels = labels
        self._nearby_host = nearby_host
        self._shares = shares
        self._incarnation = incarnation
        self._key = key
        self._inbox = inbox

    def open(self, requests: Iterable[LinkRequest], rank: int, attempt: Attempt) -> dict[LinkRequest, Connection]:
        """All of them or none, but for those of groups that the peer, or this process meanwhile, has left: `attempt.gone` names
        these.

        Raises LinkError (Unreached for a peer that was dialed in vain) or Cancelled.
        """
        opened: dict[LinkRequest, Connection] = {}
        try:
            self._dial_all([request for request in requests if request.peer < rank], rank, attempt, opened)
            for request in requests:
                if request.peer > rank:
                    connection = self._take(request, rank, attempt)
                    if connection is not None:
                        opened[request] = connection
            attempt.check()
        except BaseException:
            for connection in opened.values():
                connection.close()
            raise
        return opened

    def _take(self, request: LinkRequest, rank: int, attempt: Attempt) -> Connection | None:
        """None if the peer, or this process, has left the group. Raises LinkError or Cancelled."""
        patience_s = ASK_FIRST_S
        if self._is_over(request, rank, attempt):
            return None
        while (connection := self._inbox.take(request, attempt, patience_s)) is None:
            if self._is_over(request, rank, attempt) or self._has_left(request, attempt):
                return None
            patience_s = min(2 * patience_s, ASK_MAX_S)
        return connection

    def _is_over(self, request: LinkRequest, rank: int, attempt: Attempt) -> bool:
        """Left by this process since the attempt began: then nobody dials, and who dialed has been told."""
        by = self._labels.over(request.group)
        if by is not None:
            attempt.lose(request.group, rank if by == OWN else by)
        return by is not None

    def _has_left(self, request: LinkRequest, attempt: Attempt) -> bool:
        """Asks the peer; no answer counts as no. Raises Cancelled."""
        hello = Hello(
            kind=ASKING,
            incarnation=self._incarnation,
            peer_incarnation=request.member.incarnation,
            nonce=new_nonce(),
            group=request.group,
        )
        deadline_s = min(time.monotonic() + _ASKING_S, attempt.deadline_s)
        try:
            connection, verdict = dial(
                request.member, self._key, hello, deadline_s, attempt.dialing, nearby=request.member.host == self._nearby_host
            )
        except (LinkError, CannotConnect):
            attempt.check()
            return False
        finally:
            attempt.forget_socket()
        connection.close()
        if verdict.answer == "gone":
            attempt.learn(request, verdict)
        return verdict.answer == "gone"

    def _dial_all(self, requests: list[LinkRequest], rank: int, attempt: Attempt, opened: dict[LinkRequest, Connection]) -> None:
        """Adds to `opened`. Raises LinkError or Cancelled."""
        offers = {request: Offer() for request in requests if request.shares and self._shares}
        todo = collections.deque(requests)
        pause_s = RETRY_FIRST_S
        try:
            while todo:
                request = todo.popleft()
                if self._is_over(request, rank, attempt):
                    continue
                connection, reason = self._dial(request, rank, attempt, offers.get(request))
                if connection is None and not reason:
                    continue  # the peer has left the group
                if connection is not None:
                    opened[request] = connection
                    pause_s = RETRY_FIRST_S
                    continue
                if time.monotonic() + 2 * pause_s > attempt.deadline_s:
                    raise LinkError(f"rank {request.peer} was not ready in time: {reason}", request.peer)
                todo.append(request)
                attempt.pause(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
        finally:
            for offer in offers.values():
                offer.withdraw()

    def _dial(self, request: LinkRequest, rank: int, attempt: Attempt, offer: Offer | None) -> tuple[Connection | None, str]:
        """(connection, ""), (None, why not yet), or (None, "") if the peer has left the group. Raises Unreached, or LinkError
        if it refuses for good."""
        hello = Hello(
            kind=LINK,
            incarnation=self._incarnation,
            peer_incarnation=request.member.incarnation,
            nonce=new_nonce(),
            group=request.group,
            epoch=attempt.epoch,
            rank=rank,
            peer_rank=request.peer,
        )
        attempt.unreached = request.peer
        try:
            nearby = request.member.host == self._nearby_host
            connection, verdict = dial(
                request.member, self._key, hello, attempt.deadline_s, attempt.dialing, nearby=nearby, offer=offer
            )
        except LinkError as error:
            attempt.check()
            raise Unreached(f"no link of group {request.group} to rank {request.peer}: {error}", request.peer) from None
        finally:
            attempt.forget_socket()
            attempt.unreached = -1
        if verdict.answer == "ok":
            return connection, ""
        connection.close()
        if verdict.answer == "gone":
            attempt.learn(request, verdict)
            return None, ""
        if verdict.answer == "refused":
            reason = f"rank {request.peer} refused a link of group {request.group}: {verdict.reason}"
            raise LinkError(reason, request.peer)
        return None, verdict.reason


def _shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected yet, or over already
