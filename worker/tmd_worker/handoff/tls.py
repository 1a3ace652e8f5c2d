"""TLS for the connections that carry a state over tcp: both ends show a certificate of one authority.

Contract: who a peer is was proven by the job's key when it was connected; names in certificates are not looked at. Files are read
once, as a rank starts.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from tmd.protocol.handoff import HandoffTerms

#: In the folder that the terms name, as PEM.
CERTIFICATE, KEY, AUTHORITY = "certificate.pem", "key.pem", "authority.pem"


class NoTls(ValueError):
    """The files cannot be used; the text says where and what to do."""


def contexts(terms: HandoffTerms) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """For (serving, dialing), or None: connections are plain. Raises NoTls."""
    if not terms.tls:
        return None
    folder = Path(terms.tls)
    serving, dialing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialing.check_hostname = False
    for context in (serving, dialing):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
            context.load_verify_locations(folder / AUTHORITY)
        except OSError as error:
            raise NoTls(
                f"[handoff] tls: {CERTIFICATE}, {KEY} and {AUTHORITY} in {folder} cannot be used on this node: {error}; each "
                "compute node needs all three, readable by the job's user"
            ) from None
    return serving, dialing
