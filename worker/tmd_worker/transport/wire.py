"""Frames: what travels on a link. A header, then the payload.

The header (24 bytes, network order) carries magic, kind, epoch, sequence (per link and direction) and payload size. It is
checked before a byte of the payload reaches memory that belongs to the user.
"""

from __future__ import annotations

import enum
import struct

MAX_PAYLOAD_BYTES = 1 << 20
MAGIC = b"TMD1"
HEADER = struct.Struct("!4sB3xIQI")
HEADER_BYTES = HEADER.size


class Kind(enum.IntEnum):
    #: A piece of a collective.
    DATA = 1
    #: The sender is poisoned and closes this link: it lives.
    STOP = 2
    #: A ballot on its way to the root, and the result on its way back.
    BALLOT = 3
    RESULT = 4
    #: A buddy's record of a step, and what changed between the vote and the step's end.
    RECORD = 5
    TAIL = 6
    #: A message of send/recv, with its tag.
    MESSAGE = 7


#: What comes last on a link that is closed in order.
STOP_FRAME = HEADER.pack(MAGIC, Kind.STOP, 0, 0, 0)


class StaleFrame(ConnectionError):
    """The peer speaks in another epoch: whatever it sends is refused and the link is useless."""


class Desync(RuntimeError):
    """The peer is in the right epoch but sent something else than what comes next here: a bug, never a failure."""


class Disagreement(Desync):
    """What came is a frame, but of another call: the scripts of the two ranks do not fit together."""


def check_header(header: tuple[bytes, int, int, int, int], kind: Kind, epoch: int, sequence: int, size_bytes: int) -> None:
    """Raises StaleFrame, Desync or Disagreement unless this is the expected frame. `header` is an unpacked HEADER."""
    if header == (MAGIC, kind, epoch, sequence, size_bytes):
        return
    magic, its_kind, its_epoch, its_sequence, its_size = header
    if magic != MAGIC:
        raise Desync(f"no frame begins with {magic!r}: the framing of this link is lost")
    if its_epoch != epoch:
        raise StaleFrame(f"sent a frame of epoch {its_epoch} in epoch {epoch}")
    name = Kind(its_kind).name if its_kind in Kind._value2member_map_ else f"kind {its_kind}"
    raise Disagreement(
        f"got {name} frame {its_sequence} of {its_size} bytes, expected {kind.name} frame {sequence} of {size_bytes} bytes: "
        "the ranks call different collectives, or the same ones in a different order or with different sizes"
    )
