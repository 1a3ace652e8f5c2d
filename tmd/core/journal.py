"""What one event made worth writing down. The daemon writes it in one transaction before it sends anything, so nothing is
ever acted on that a crash could forget."""

from __future__ import annotations

from tmd.core.instructions import Persist
from tmd.core.records import EventRecord, JobRecord, MigrationRecord, NodeRecord, RankRecord


class Journal:
    """Gathers changed records and new events until `take`."""

    def __init__(self, last_event_id: int) -> None:
        self._last_event_id = last_event_id
        self._last_about: dict[tuple[str, str], int] = {}
        self._jobs: dict[str, JobRecord] = {}
        self._ranks: dict[str, RankRecord] = {}
        self._nodes: dict[tuple[str, str], NodeRecord] = {}
        self._migrations: dict[str, MigrationRecord] = {}
        self._events: list[EventRecord] = []
        self._paused: bool | None = None

    def tell(self, now: float, *, job_id: str, subject: str, kind: str, text: str, cause: int | None = None) -> int:
        """Appends an event and returns its id. Without `cause` the last event about the same subject led to this one."""
        self._last_event_id += 1
        if cause is None:
            cause = self.last_about(job_id, subject)
        event = EventRecord(
            event_id=self._last_event_id, cause=cause, time_s=now, job_id=job_id, subject=subject, kind=kind, text=text
        )
        self._events.append(event)
        self._last_about[job_id, subject] = event.event_id
        return event.event_id

    def last_about(self, job_id: str, subject: str) -> int:
        """The last event of this daemon's life about `subject`, 0 for none."""
        return self._last_about.get((job_id, subject), 0)

    def next_event_id(self) -> int:
        """The id that the next event will have: unique for ever, so it can name what that event creates."""
        return self._last_event_id + 1

    def keep_job(self, record: JobRecord) -> None:
        self._jobs[record.job_id] = record

    def keep_rank(self, record: RankRecord) -> None:
        self._ranks[record.incarnation] = record

    def keep_node(self, record: NodeRecord) -> None:
        self._nodes[record.job_id, record.node] = record

    def keep_migration(self, record: MigrationRecord) -> None:
        self._migrations[record.migration_id] = record

    def keep_paused(self, paused: bool) -> None:
        self._paused = paused

    def take(self) -> Persist | None:
        """All that was gathered, or None if there is nothing to write."""
        if not (self._jobs or self._ranks or self._nodes or self._migrations or self._events or self._paused is not None):
            return None
        persist = Persist(
            jobs=tuple(self._jobs.values()),
            ranks=tuple(self._ranks.values()),
            nodes=tuple(self._nodes.values()),
            migrations=tuple(self._migrations.values()),
            events=tuple(self._events),
            paused=self._paused,
        )
        self._jobs, self._ranks, self._nodes, self._migrations, self._events = {}, {}, {}, {}, []
        self._paused = None
        return persist
