"""The settings of the dashboard's server: how its own machine reaches it, and who else does."""

from pathlib import Path

import pytest

from app.dashboard.config import Settings
from app.endpoints import DashboardConfig


@pytest.mark.parametrize(
    ("host", "cert", "url", "on_loopback"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:8002", True),
        ("localhost", None, "http://localhost:8002", True),
        ("::1", "c.pem", "https://[::1]:8002", True),
        ("0.0.0.0", "c.pem", "https://127.0.0.1:8002", False),
        ("::", None, "http://127.0.0.1:8002", False),
        ("10.1.0.2", None, "http://10.1.0.2:8002", False),
    ],
)
def test_the_server_has_the_url_that_its_configuration_says(
    host: str, cert: str | None, url: str, on_loopback: bool
) -> None:
    settings = Settings(host, 8002, "m", "0", Path("unused"), tls_cert=cert)
    assert (settings.url, settings.on_loopback) == (url, on_loopback)
    assert DashboardConfig(host=host, port=8002, tls_cert=cert, tls_key=cert).url == url
