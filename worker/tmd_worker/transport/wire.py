"""Frames: what travels on a link. A header (magic, kind, epoch, sequence per link and direction, payload size), then the payload."""

from __future__ import annotations

import enum
import struct

MAX_PAYLOAD_BYTES = 1 << 20
MAGIC = b"TMD1"
HEADER = struct.Struct("!4sB3xIQI")


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
