"""Real certificates of a CA that a test makes, as files."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import trustme

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Issued:
    """A certificate's files, and what a test asks of it."""

    cert: Path
    key: Path
    pem: str
    end: datetime.datetime

    def flags(self) -> tuple[str, str]:
        return f"--tls-cert={self.cert}", f"--tls-key={self.key}"


class Authority:
    """A CA, whose certificate is the file ``ca``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._made = 0
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str, days: int = 30) -> Issued:
        """A certificate for ``names``, or the machine itself, that ends in ``days``, or has ended."""
        end = (datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)).replace(microsecond=0)
        begin = end - datetime.timedelta(days=90)
        leaf = self._authority.issue_cert(*(names or HOSTS), not_before=begin, not_after=end)
        self._made += 1
        cert, key = (self._folder / f"{self._made}.{kind}" for kind in ("crt", "key"))
        pem = leaf.cert_chain_pems[0].bytes().decode()
        cert.write_text(pem)
        leaf.private_key_pem.write_to_path(key)
        return Issued(cert, key, pem, end)


class Mounted:
    """Files that change at once, as those of a Kubernetes secret do: links into a folder that a link leads to."""

    def __init__(self, folder: Path, **files: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._made = 0
        self.put(**files)
        for name in files:
            (folder / name).symlink_to(f"..data/{name}")

    def __getitem__(self, name: str) -> Path:
        return self._folder / name

    def read(self) -> dict[str, bytes]:
        """All of them, of one time."""
        return {file.name: file.read_bytes() for file in (self._folder / "..data").resolve().iterdir()}

    def put(self, **files: Path) -> None:
        """``name``: the file whose text it has from now on."""
        self._made += 1
        data = self._folder / f"..{self._made}"
        data.mkdir()
        for name, file in files.items():
            (data / name).write_bytes(file.read_bytes())
        (self._folder / "..new").symlink_to(data.name)
        os.replace(self._folder / "..new", self._folder / "..data")
