"""With certificates a state goes through TLS, and an end whose certificate is somebody else's gets none of it."""

from __future__ import annotations

import contextlib
import random
import subprocess
from pathlib import Path

import pytest

from tests.handoff.rig import DEADLINE_S, Pair, connected
from tmd.protocol.handoff import HandoffTerms
from tmd_worker.handoff import tls
from tmd_worker.handoff.transfer import CHUNK_BYTES, TransferFailed


def certified(folder: Path, name: str) -> HandoffTerms:
    """A certificate that is its own authority."""
    place = folder / name
    place.mkdir()
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run(
        [*command, "-subj", f"/CN={name}", "-keyout", str(place / tls.KEY), "-out", str(place / tls.CERTIFICATE)],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    (place / tls.AUTHORITY).write_bytes((place / tls.CERTIFICATE).read_bytes())
    return HandoffTerms(tls=str(place))


def test_a_state_goes_through_tls(tmp_path: Path) -> None:
    entries = [random.Random(1).randbytes(CHUNK_BYTES + 77), b"", b"x"]
    with connected(entries, tls=tls.contexts(certified(tmp_path, "nodes"))) as pair:
        assert pair.joiner._wires[0]._sock.version() == "TLSv1.3"
        assert pair.read().missing == 0
        assert pair.joiner_memory.contents() == entries


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    ours, theirs = tls.contexts(certified(tmp_path, "ours")), tls.contexts(certified(tmp_path, "theirs"))
    assert ours is not None
    assert theirs is not None
    with contextlib.closing(Pair([b"secret"], tls=(theirs[0], ours[1]))) as pair:
        with pytest.raises(TransferFailed, match="no connection to the source's data"):
            pair.connect(10.0)
        assert pair.joiner_memory.contents() == [bytes(6)]


def test_files_that_are_not_there_are_named() -> None:
    assert tls.contexts(HandoffTerms()) is None
    with pytest.raises(tls.NoTls, match=r"in /nowhere cannot be used on this node: .*readable by the job's user"):
        tls.contexts(HandoffTerms(tls="/nowhere"))
