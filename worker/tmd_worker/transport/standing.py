"""Which links and inner groups a process has: live ones, those that wait for epoch or flip, and what a flip left over.

Contract: a set is in one place at a time. The caller holds its lock for as long as what it looks up must stay so.
"""

from __future__ import annotations

from collections.abc import Iterator

from tmd_worker.transport.epochs import LinkSet, Remains
from tmd_worker.transport.link import Link


class Standing:
    """For one process."""

    def __init__(self) -> None:
        self.live: LinkSet | None = None
        #: The live ones, or those that were live last.
        self._ran: LinkSet | None = None
        #: By epoch: opened for one that lies ahead.
        self._opened: dict[int, LinkSet] = {}
        #: By plan: for its flip.
        self.staged: dict[int, LinkSet] = {}
        #: What the last switches left unused.
        self._replaced: list[Remains] = []

    def put(self, links: LinkSet, plan_id: int) -> None:
        """`plan_id` 0: for its epoch."""
        if plan_id:
            self.staged[plan_id] = links
        else:
            self._opened[links.epoch] = links

    def usable(self) -> list[LinkSet]:
        """The live ones and those that wait for their epoch: what a group that is made now must become part of."""
        return [links for links in (self.live, *self._opened.values()) if links is not None]

    def take(self, epoch: int) -> LinkSet | None:
        """What was opened or staged for this epoch, if anything."""
        links = self._opened.pop(epoch, None)
        for plan_id, staged in list(self.staged.items()):
            if links is None and staged.epoch == epoch:
                links = self.staged.pop(plan_id)
        return links

    def go_live(self, links: LinkSet) -> int:
        """Returns how many links between members that stay were opened anew."""
        reopened = links.reopened(self._ran) if self._ran is not None else 0
        self.live = self._ran = links
        return reopened

    def leave(self, remains: Remains) -> None:
        """A switch has replaced these; others may use them still."""
        self._replaced.append(remains)

    def take_left(self, up_to_epoch: int) -> list[Remains]:
        """What switches from epochs up to this one left."""
        taken = [remains for remains in self._replaced if remains.epoch <= up_to_epoch]
        self._replaced = [remains for remains in self._replaced if remains.epoch > up_to_epoch]
        return taken

    def take_all(self, up_to_epoch: int) -> list[Remains]:
        """Everything of epochs up to this one; nothing is live then, if that was of one of them."""
        taken = self.take_left(up_to_epoch)
        if self.live is not None and self.live.epoch <= up_to_epoch:
            taken.append(self.live.remains())
            self.live = None
        for shelf in (self._opened, self.staged):
            for key in [key for key, links in shelf.items() if links.epoch <= up_to_epoch]:
                taken.append(shelf.pop(key).remains())
        return taken

    def sets(self) -> list[LinkSet]:
        """Those and the staged ones: all but what is left over."""
        return [*self.usable(), *self.staged.values()]

    def incarnations(self) -> set[str]:
        """Of all members of these."""
        return {member.incarnation for links in self.sets() for member in links.membership.members.values()}

    def links(self) -> Iterator[Link]:
        """All that are open."""
        for links in self.sets():
            yield from links.all_links()
        for remains in self._replaced:
            yield from remains.links
