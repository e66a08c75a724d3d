"""The listener with TLS: the same API over https, streamed too."""

import datetime as dt
import ipaddress
import json
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.ingress.http.listener import ListenerConfig
from tests.app.ingress.rig import pair, rig


def certificate(directory: Path) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / "cert.pem", directory / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_path.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    return str(cert_path), str(key_path)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
async def test_the_api_over_tls(tmp_path: Path, fast: bool) -> None:
    cert, key = certificate(tmp_path)
    listener = ListenerConfig(port=0, tls_cert=cert, tls_key=key, fast=fast)
    async with rig(tmp_path, pair(tmp_path), listener=listener) as made:
        url = f"https://127.0.0.1:{made.listener.port}"
        async with httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=cert)) as client:
            answer = await client.post("/v1/chat/completions", json=made.chat())
            assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 w2 w3 "
            answer = await client.post("/v1/chat/completions", json=made.chat(stream=True))
            pieces = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
            assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == "w0 w1 w2 w3 "
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as plain:
                await plain.get(f"http://127.0.0.1:{made.listener.port}/health")
        await made.idle()


@pytest.mark.parametrize(
    "options",
    [{"tls_cert": "a"}, {"tls_key": "a"}, {"port": 70_000}, {"keep_alive_s": 0}, {"handshake_s": 0}],
)
def test_a_wrong_listener_configuration_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="listener: "):
        ListenerConfig(**options)  # type: ignore[arg-type]


async def test_a_taken_port_says_what_to_do(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        with pytest.raises(OSError, match="free the port or choose another"):
            async with rig(tmp_path / "b", [], listener=ListenerConfig(port=made.listener.port)):
                pass
