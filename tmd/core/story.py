"""The story of an object: its events, and those that led to them, told from the append-only log."""

from __future__ import annotations

from collections.abc import Iterable

from tmd.core.records import EventRecord


def story(events: Iterable[EventRecord], subject: str) -> list[EventRecord]:
    """The events about `subject` and, through their causes, all that led to them, in order. Empty for an unknown subject.

    `events` may come in any order and hold those of other objects; a cause that is not among them is left out.
    """
    known = {event.event_id: event for event in events}
    told: set[int] = set()
    pending = [event.event_id for event in known.values() if event.subject == subject]
    while pending:
        event_id = pending.pop()
        if event_id in told or event_id not in known:
            continue
        told.add(event_id)
        pending.append(known[event_id].cause)
    return [known[event_id] for event_id in sorted(told)]
