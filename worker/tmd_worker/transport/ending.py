"""The end of links and inner groups that are not needed any more, or must not be used any more."""

from __future__ import annotations

from tmd_worker.threads import Spawn
from tmd_worker.transport.buddy import BuddyChannel
from tmd_worker.transport.epochs import Remains
from tmd_worker.transport.inner import InnerGroup
from tmd_worker.transport.link import Link
from tmd_worker.transport.watcher import Watcher


class Ending:
    """For one process."""

    def __init__(self, watcher: Watcher, buddy: BuddyChannel, spawn: Spawn) -> None:
        self._watcher = watcher
        self._buddy = buddy
        self._spawn = spawn

    def watch(self, link: Link) -> None:
        """One of a group that this process has left, so that its end is noticed."""
        link.ignored = False
        self._watcher.add(link)

    def close(self, links: list[Link]) -> None:
        """Of a group that both ends have left: nobody is told anything."""
        for link in links:
            self._watcher.remove(link)
            link.shut()

    def release(self, inners: list[InnerGroup]) -> None:
        """In the background: all members are done with them."""
        if inners:
            self._spawn("release", lambda: _release(inners))

    def end(self, *remains: Remains, drain: bool = False) -> None:
        """Says STOP on all links and closes them; aborts all inner groups as a set and gives them back in the background.

        `drain`: what a ward sent is still read to its end.
        """
        links = [link for each in remains for link in each.links]
        inners = [inner for each in remains for inner in each.inners]
        drained = {link for link in links if drain and self._buddy.is_read(link)}
        for link in links:
            self._watcher.remove(link)
            if link not in drained:
                self._buddy.interrupt(link)
        for link in links:
            link.say_stop()
        for link in links:  # only now: who sees the end of one link finds the STOP on another, if it did not fit on this one
            link.shut(keep_reading=link in drained)
        for inner in inners:
            inner.abort()
        self.release(inners)


def _release(inners: list[InnerGroup]) -> None:
    for inner in inners:
        inner.release()
