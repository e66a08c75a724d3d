"""The bar and the lines of a long run, with a clock of our own."""

import io

from benchmarks.progress import Progress, teller


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_with_the_time_left():
    clock, terminal = Clock(), Terminal()
    with Progress("sweep", 4, terminal, clock) as progress:
        for second in (30, 60, 90):
            clock.now_s = second
            progress.step("a variant")
    last = terminal.getvalue().split("\r")[-1]
    assert "#" * 18 + "." * 6 in last
    # three of four in 90 s: 30 s are left
    assert "75%  1 min 30 s gone, about 30 s left  a variant" in last
    assert terminal.getvalue().endswith("\n")


def test_a_file_gets_a_line_now_and_then():
    clock, file = Clock(), io.StringIO()
    with Progress("sweep", 1_000, file, clock) as progress:
        for step in range(1_000):
            clock.now_s = step * 0.1
            progress.step()
    lines = file.getvalue().splitlines()
    # at the start, every 30 s and at the end, of 100 s
    assert len(lines) == 5
    assert lines[0].startswith("sweep:   0%")
    assert lines[-1].startswith("sweep: 100%")
    assert "1 min 40 s gone" in lines[-1]


def test_nothing_to_do_is_done():
    file = io.StringIO()
    with Progress("sweep", 0, file, Clock()):
        pass
    assert "100%" in file.getvalue()


def test_hours_are_shown_as_hours():
    clock, file = Clock(), io.StringIO()
    with Progress("sweep", 10, file, clock) as progress:
        clock.now_s = 3_600.0
        progress.at(4)
    assert "1 h 00 min gone, about 1 h 30 min left" in file.getvalue()


def test_lines_have_the_seconds_since_their_teller_was_made(capsys):
    clock = Clock()
    clock.now_s = 5.0
    say = teller(clock)
    say("begun")
    clock.now_s = 1239.5
    say("done")
    assert capsys.readouterr().out == "[   0.0 s] begun\n[1234.5 s] done\n"
