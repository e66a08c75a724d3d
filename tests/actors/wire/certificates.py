"""Certificates for tests: an authority, and folders of members that it has signed."""

import datetime as dt
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM
DAY = dt.timedelta(days=1)


class Authority:
    """A private authority. Each one has a key of its own, and all have the same name unless they are given one."""

    def __init__(self, name: str = "authority of the test") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.certificate = self._sign(self._name, self._key, dt.datetime.now(dt.UTC) + DAY, is_authority=True)

    def pem(self) -> bytes:
        return self.certificate.public_bytes(PEM)

    def member(
        self, folder: Path, name: str = "member", *, expired: bool = False, trusts: bytes | None = None
    ) -> Path:
        """Writes the three files of a member into `folder`, over those that are there, and returns the folder.

        It trusts this authority, or those in `trusts`.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        until = dt.datetime.now(dt.UTC) + (-DAY / 2 if expired else DAY)
        made = self._sign(_name(name), key, until, is_authority=False)
        folder.mkdir(exist_ok=True)
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        contents = {
            "tls.crt": made.public_bytes(PEM),
            "tls.key": private,
            "ca.crt": self.pem() if trusts is None else trusts,
        }
        for file, content in contents.items():
            # another file in its place, as those that renew certificates do it
            (folder / f"{file}.new").write_bytes(content)
            (folder / f"{file}.new").rename(folder / file)
        return folder

    def _sign(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, until: dt.datetime, is_authority: bool
    ) -> x509.Certificate:
        usage = x509.KeyUsage(True, False, False, False, False, is_authority, is_authority, False, False)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(until - 2 * DAY)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
