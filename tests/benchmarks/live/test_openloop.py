"""The open-loop client against real HTTP servers on loopback: nothing waits for an answer, bad answers are named."""

import asyncio

from benchmarks.live.bare import ROLE, TOKEN, chunk
from benchmarks.live.openloop import Answer, Planned, replay
from tests.benchmarks.live.test_load import HEAD, PATH, good, serving

END = (
    chunk(b'data: {"choices":[{"index":0,"finish_reason":"length"}]}\n\n')
    + chunk(b"data: [DONE]\n\n")
    + chunk(b"")
)


def plan(*at_s: float) -> list[Planned]:
    return [Planned(at, b'{"n":%d}' % index) for index, at in enumerate(at_s)]


def test_whole_answers_have_their_times_in_order() -> None:
    with serving(good) as server:
        answers = replay(server.port, PATH, plan(0.0, 0.05, 0.1), 10.0)
    for at_s, answer in zip((0.0, 0.05, 0.1), answers, strict=True):
        assert answer.problem is None
        assert answer.planned_s == at_s
        # an event loop's timer may fire a millisecond early
        assert at_s <= answer.sent_s + 2e-3
        assert answer.sent_s <= answer.first_s <= answer.last_s
        assert answer.late_s == answer.sent_s - at_s


def test_a_request_does_not_wait_for_the_answers_before_it() -> None:
    everybody_is_here = asyncio.Event()

    async def together(number: int, out: asyncio.StreamWriter) -> bool:
        """Answers nobody before the third request has come: a closed loop would wait without end."""
        if number == 3:
            everybody_is_here.set()
        await everybody_is_here.wait()
        return await good(number, out)

    with serving(together) as server:
        answers = replay(server.port, PATH, plan(0.0, 0.01, 0.02), 20.0)
        assert server.most_open == 3
    assert [answer.problem for answer in answers] == [None] * 3


def test_a_connection_at_rest_is_used_again() -> None:
    with serving(good) as server:
        replay(server.port, PATH, plan(0.0), 10.0)
        assert server.connections == 1
        replay(server.port, PATH, plan(*[0.25 * i for i in range(12)]), 10.0)
        # twelve requests on their own would have made it thirteen
        assert server.connections < 13


def test_what_went_wrong_is_said_of_the_request_that_it_happened_to() -> None:
    async def moody(number: int, out: asyncio.StreamWriter) -> bool:
        if number == 1:
            out.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull")
            return True
        if number == 2:
            out.write(HEAD + ROLE + TOKEN)
            return False  # cut
        if number == 3:
            out.write(HEAD + ROLE + END)
            return True
        return await good(number, out)

    with serving(moody) as server:
        answers = [replay(server.port, PATH, plan(0.0), 10.0)[0] for _ in range(4)]
    assert answers[0].problem == "status 503: full"
    assert answers[1].problem is not None
    assert "connection ended" in answers[1].problem
    assert answers[2].problem == "no text"
    assert answers[3].problem is None


def test_an_answer_that_does_not_come_is_no_answer() -> None:
    async def never(number: int, out: asyncio.StreamWriter) -> bool:
        while not out.is_closing():
            await asyncio.sleep(0.01)
        return False

    with serving(never) as server:
        answers = replay(server.port, PATH, plan(0.0), 0.2)
    assert [answer.problem for answer in answers] == ["not answered in time"]
    assert Answer(0.0).problem == "not answered in time"
