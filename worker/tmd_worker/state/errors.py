"""What can go wrong with a role's state. Every text names the entry, says what it means and what to do."""

from __future__ import annotations


class StateError(RuntimeError):
    """Base of all errors of this package."""


class TrackRefused(StateError, TypeError):
    """`track` was given something whose state this release cannot keep bit for bit."""


class StateMismatch(StateError, ValueError):
    """A state from elsewhere does not fit what is tracked here; nothing was touched."""


class StateUnusable(StateError):
    """A hand-over began and did not end: what is in memory is half old, half new, and must not be used."""


class TransferBroken(StateError, ConnectionError):
    """A state or record did not arrive whole: the link closed, stalled, or a digest differs."""


class DataExhausted(StateError):
    """A source of data ended that cannot be started again."""
