"""The links and inner groups of one epoch: opened together, swapped together, ended together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tmd.protocol.membership import Membership
from tmd_worker.transport.group import Group
from tmd_worker.transport.inner import InnerGroup
from tmd_worker.transport.link import Link
from tmd_worker.transport.opening import Attempt, LinkRequest, Opener
from tmd_worker.transport.preparing import Preparer


@dataclasses.dataclass(slots=True, eq=False)
class Remains:
    """What is to be ended."""

    epoch: int
    links: list[Link]
    inners: list[InnerGroup]


@dataclasses.dataclass(slots=True, eq=False)
class LinkSet:
    """Group name -> global rank -> link, under one membership in which this process is `rank`."""

    membership: Membership
    rank: int
    #: For a plan: until the flip nobody cares when one of its links breaks.
    staged: bool = False
    #: Only links to these ranks are part of it (None: to all).
    only: frozenset[int] | None = None
    links: dict[str, dict[int, Link]] = dataclasses.field(default_factory=dict)
    #: Group name -> what carries its collectives, where links do not.
    inners: dict[str, InnerGroup] = dataclasses.field(default_factory=dict)
    #: Those that were asked for, by name.
    groups: dict[str, Group] = dataclasses.field(default_factory=dict)
    #: Groups that a member has left, and the rank that destroyed them.
    gone: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def epoch(self) -> int:
        return self.membership.epoch

    def all_links(self) -> Iterator[Link]:
        for links in list(self.links.values()):
            yield from list(links.values())

    def remains(self) -> Remains:
        return Remains(self.epoch, list(self.all_links()), list(self.inners.values()))

    def take_out(self, name: str) -> tuple[dict[int, Link], InnerGroup | None]:
        """What there is of this group is no part of the set any more."""
        self.groups.pop(name, None)
        self.gone.pop(name, None)
        return self.links.pop(name, {}), self.inners.pop(name, None)

    def remains_of(self, group: Group) -> Remains:
        inner = self.inners.get(group.name)
        return Remains(self.epoch, list(self.links.get(group.name, {}).values()), [inner] if inner is not None else [])

    def prepare_for(self, groups: list[Group], preparer: Preparer, attempt: Attempt) -> None:
        """Makes the inner groups that these groups need and adds them. Raises LinkError or Cancelled.

        In the order in which the groups were made, which is the same on all members: so nobody waits in a circle.
        """
        for group in groups:
            if group.carried and (self.only is None or self.only & set(group.ranks)):
                inner = preparer.prepare(group, self.membership, self.rank, attempt)
                if inner is not None:
                    self.inners[group.name] = inner
        self.gone |= attempt.gone

    def open_for(self, groups: list[Group], opener: Opener, attempt: Attempt) -> int:
        """Opens what these groups need and adds it; returns how many links. Raises LinkError or Cancelled."""
        requests = [
            LinkRequest(group.name, peer, self.membership.members[peer], group.shares)
            for group in groups
            for peer in sorted(group.neighbours())
            if self.only is None or peer in self.only
        ]
        connections = opener.open(requests, self.rank, attempt)
        timeouts_s = {group.name: group.timeout_s for group in groups}
        opened: dict[str, dict[int, Link]] = {group.name: {} for group in groups}
        for request, connection in connections.items():
            link = Link(connection, peer=request.peer, epoch=self.epoch, timeout_s=timeouts_s[request.group])
            link.ignored = self.staged
            opened[request.group][request.peer] = link
        self.links.update(opened)
        self.groups |= {group.name: group for group in groups}
        self.gone |= attempt.gone
        return len(connections)

    def reopened(self, before: LinkSet) -> int:
        """How many links of `before` to processes that are still members were opened anew. Both ends of a link count it."""
        stays = {
            peer
            for peer, member in self.membership.members.items()
            if member.incarnation == before.membership.members[peer].incarnation
        }
        return sum(
            link is not before.links[name].get(peer, link)
            for name, links in self.links.items()
            if name in before.links
            for peer, link in links.items()
            if peer in stays
        )

    def succeed(self, successor: LinkSet, leavers: frozenset[int]) -> tuple[LinkSet, Remains]:
        """This set after the flip: links to leavers and inner groups with leavers replaced by the successor's, the others kept.
        Also returns the replaced."""
        replaced: list[Link] = []
        links = {}
        for name, old in self.links.items():
            replaced += [link for peer, link in old.items() if peer in leavers]
            links[name] = {peer: link for peer, link in old.items() if peer not in leavers} | successor.links.get(name, {})
        after = LinkSet(successor.membership, self.rank, links=links, inners=self.inners | successor.inners)
        after.groups = self.groups | successor.groups
        for link in after.all_links():
            link.epoch = after.epoch
        return after, Remains(self.epoch, replaced, [self.inners[name] for name in successor.inners if name in self.inners])
