"""Exit codes of a rank that the library chooses, for the rank that ends with one and for the daemon that reads it. Every other
positive code is the script's own."""

from __future__ import annotations

#: It found its own invariants broken.
EXIT_BROKEN = 70
#: One of the library's threads ended with an exception.
EXIT_THREAD = 71
#: The attempt that it was in can be neither finished nor taken back.
EXIT_TORN = 72
#: It held for too long without word from the daemon, as all ranks do then: the job's launcher may requeue it (EX_TEMPFAIL).
EXIT_HELD = 75

#: The rank cannot be trusted any more, which is nobody's fault but the library's or the machine's: it is replaced.
LOST_CODES = frozenset({EXIT_BROKEN, EXIT_THREAD, EXIT_TORN})
