"""`assign`: the order that is sent, its typed answer, and what is refused unsent."""

from __future__ import annotations

import pytest

from sluice import ApiError
from tests.sluice.drivers import Driver
from tests.sluice.server import ContractServer, answers, api_error

PATH = "/sluice/admin/engines/decode-1"
ANSWER = {
    "engine": "decode-1",
    "before": {"role": "decode", "duty": "active"},
    "after": {"role": "decode", "duty": "warm"},
}


def test_an_order_is_one_request_and_its_answer_is_typed(server: ContractServer, driver: Driver) -> None:
    server.on(f"PUT {PATH}", answers(200, ANSWER))
    assigned = driver.call(server.url, "assign", "decode-1", duty="warm", settings={"admin_key": "root"})
    assert (assigned.engine, assigned.before.duty, assigned.after.duty) == ("decode-1", "active", "warm")
    assert server.requests[0].json == {"duty": "warm"}
    assert server.requests[0].headers["authorization"] == "Bearer root"


def test_an_order_that_says_nothing_is_not_sent(server: ContractServer, driver: Driver) -> None:
    with pytest.raises(ValueError, match="nothing to change"):
        driver.call(server.url, "assign", "decode-1")
    assert server.requests == []


def test_why_an_engine_takes_no_orders_is_in_the_error(server: ContractServer, driver: Driver) -> None:
    server.on(f"PUT {PATH}", answers(409, api_error("the autoscaler decides", code=None)))
    with pytest.raises(ApiError, match="the autoscaler decides") as caught:
        driver.call(server.url, "assign", "decode-1", role="prefill")
    assert caught.value.status_code == 409
