"""How a trainer and its servers know each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import _native

_VARIABLES = {
    "ca": "SHARDMLP_TLS_CA",
    "cert": "SHARDMLP_TLS_CERT",
    "key": "SHARDMLP_TLS_KEY",
    "server_name": "SHARDMLP_TLS_SERVER_NAME",
    "token_file": "SHARDMLP_TOKEN_FILE",
}


@dataclass(frozen=True)
class Credentials:
    """Names of files, which are read for each connection, and the token's for each call. Nothing at all: neither TLS nor a
    token. A Unix socket takes no TLS.

    Attributes:
        ca: PEM of the CA that the server's certificate comes from. Connections are TLS with it, and plaintext without.
        cert: PEM of this trainer's own certificate, for a server with --tls-client-ca.
        key: PEM of the certificate's key.
        server_name: What the server's certificate names, where that is not the host in the target.
        token_file: Its first line goes with every call, for a server with --token-file.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None
    token_file: str | Path | None = None

    @classmethod
    def from_environment(cls) -> Credentials:
        """As SHARDMLP_TLS_CA, SHARDMLP_TLS_CERT, SHARDMLP_TLS_KEY, SHARDMLP_TLS_SERVER_NAME and SHARDMLP_TOKEN_FILE
        say."""
        return cls(**{field: os.environ.get(variable) for field, variable in _VARIABLES.items()})

    def native(self) -> _native.Credentials:
        return _native.Credentials(
            ca_file=str(self.ca or ""),
            cert_file=str(self.cert or ""),
            key_file=str(self.key or ""),
            server_name=self.server_name or "",
            token_file=str(self.token_file or ""),
        )
