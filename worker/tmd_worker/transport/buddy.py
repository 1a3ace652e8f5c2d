"""The records of small state: this rank's go to its buddy, its ward's are kept here (two generations)."""

from __future__ import annotations


class BuddyChannel:
    """The link to the buddy and the one from the ward."""

    def send(self, kind: int, step: int, payload: bytes, *, epoch: int | None = None) -> None:
        """Sends a RECORD or TAIL (`wire.Kind`) to the buddy; returns once the kernel has it. Does nothing when poisoned.

        `epoch`: through the links opened for an epoch that is not active yet; default: the live one.
        """

    def wait_for(self, step: int, deadline_s: float) -> bool:
        """True once the ward's RECORD of this step, sent in the live epoch, is here; False when poisoned.

        A deadline that passes breaks the link to the ward first, so False always means poisoned.
        """
        return False

    def ward_records(self, step: int) -> tuple[bytes, bytes | None, bool] | None:
        """(record, tail or None, whether this ward ever sent a tail) of this step, or None.

        After poison it waits (bounded) until the ward's link is read to its end.
        """
        return None
