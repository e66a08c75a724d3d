"""The commands `sluice chat` and `sluice complete`."""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Iterable
from typing import Any

from sluice import SLO, Sluice, SluiceError, Stream
from sluice.types import ChatChunk, ChatCompletion, Completion, CompletionChunk, Usage

from .output import Exit, UsageError, complain, connect, finite_float, positive_float, report

PRIORITY_CLASSES = ("interactive", "standard", "batch")


def configure_chat(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice chat` to `parser`."""
    parser.add_argument("prompt", nargs="?", help='the message; "-" or nothing reads it from standard input')
    parser.add_argument("-i", "--interactive", action="store_true", help="a conversation of several turns")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _configure_generation(parser)
    parser.set_defaults(run=run_chat)


def configure_complete(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice complete` to `parser`."""
    parser.add_argument(
        "prompt", nargs="?", help='the text to continue; "-" or nothing reads it from standard input'
    )
    _configure_generation(parser)
    parser.set_defaults(run=run_complete)


def _configure_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument("--model", metavar="NAME", help="default: the model that is served")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most output tokens")
    group.add_argument("--temperature", type=finite_float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=finite_float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--priority",
        type=_priority,
        metavar="P",
        help="interactive, standard, batch, or an integer (smaller is earlier)",
    )
    group.add_argument(
        "--slo-ttft-ms", type=positive_float, metavar="MS", help="objective: time to the first token"
    )
    group.add_argument(
        "--slo-tpot-ms", type=positive_float, metavar="MS", help="objective: time per further token"
    )
    group.add_argument(
        "--session", metavar="ID", help="name of the conversation, by which forecasts of lengths learn"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--no-stream", action="store_true", help="print the answer when it is complete")
    group.add_argument(
        "--json", action="store_true", help="print the server's whole answer as JSON (no streaming)"
    )
    group.add_argument(
        "--stats", action="store_true", help="print time to first token and tokens/s to stderr"
    )


def _priority(text: str) -> int | str:
    if text in PRIORITY_CLASSES:
        return text
    try:
        return int(text)
    except ValueError:
        allowed = ", ".join(PRIORITY_CLASSES)
        raise argparse.ArgumentTypeError(f"must be {allowed} or an integer, got {text!r}") from None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the request's options. An option that was not given is None, which the SDK does not send."""
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "priority", "session")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    if args.slo_ttft_ms is not None or args.slo_tpot_ms is not None:
        options["slo"] = SLO(args.slo_ttft_ms, args.slo_tpot_ms)
    return options


def run_chat(args: argparse.Namespace) -> int:
    """Prints the answer to one message, or holds a conversation; returns the exit code."""
    if args.interactive:
        if args.json or args.no_stream:
            raise UsageError("--interactive streams text: leave out --json and --no-stream")
        with connect(args) as client:
            return _converse(client, args)
    messages = [*_system(args), {"role": "user", "content": _prompt(args.prompt)}]
    options = _options(args)
    with connect(args) as client:
        if args.json or args.no_stream:
            watch = Stopwatch()
            _print_whole(client.chat(messages, **options), watch, args)
        else:
            _print_stream(client.stream_chat(messages, **options), args)
    return Exit.OK


def run_complete(args: argparse.Namespace) -> int:
    """Prints the continuation of one prompt, and returns the exit code."""
    prompt, options = _prompt(args.prompt), _options(args)
    with connect(args) as client:
        if args.json or args.no_stream:
            watch = Stopwatch()
            _print_whole(client.completions(prompt, **options), watch, args)
        else:
            _print_stream(client.stream_completions(prompt, **options), args)
    return Exit.OK


def _system(args: argparse.Namespace) -> list[dict[str, str]]:
    return [] if args.system is None else [{"role": "system", "content": _utf8(args.system, "--system")}]


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return _utf8(given, "the prompt")
    if given is None and sys.stdin.isatty():
        raise UsageError('no message: write sluice chat "...", or -i for a conversation, or pipe text in')
    return _utf8(sys.stdin.read(), "standard input")


def _utf8(text: str, what: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8; convert it first, e.g. with iconv") from None
    return text


class Stopwatch:
    """The times of one answer, for `--stats`."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s

    def text_arrived(self) -> None:
        """Notes the time of a piece of text; called for every piece."""
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = self._last_s

    def line(self, usage: Usage | None, request_id: str | None) -> str:
        """Returns one line of figures; for a streamed answer tokens/s is counted after the first token."""
        parts = []
        if self._first_s is not None:
            parts.append(f"TTFT {(self._first_s - self._start_s) * 1e3:.0f} ms")
        total_s = time.perf_counter() - self._start_s
        tokens = None if usage is None else usage.completion_tokens
        parts.append(f"{'?' if tokens is None else tokens} tokens in {total_s:.2f} s")
        rate = self._rate(tokens, total_s)
        if rate is not None:
            parts.append(f"{rate:.1f} tok/s")
        if request_id is not None:
            parts.append(f"request {request_id}")
        return " | ".join(parts)

    def _rate(self, tokens: int | None, total_s: float) -> float | None:
        if tokens is None:
            return None
        counted, seconds = tokens, total_s
        if self._first_s is not None:
            counted, seconds = tokens - 1, self._last_s - self._first_s
        return counted / seconds if counted > 0 and seconds > 0 else None


def _print_stream(stream: Stream[ChatChunk] | Stream[CompletionChunk], args: argparse.Namespace) -> str:
    """Prints the text as it comes, and returns all of it. After an error the printed part still ends its line."""
    watch, pieces = Stopwatch(), _Pieces()
    try:
        with stream:
            for chunk in stream:
                if chunk.text:
                    watch.text_arrived()
                    pieces.add(chunk.text)
    finally:
        pieces.end_line()
    if args.stats:
        print(watch.line(stream.usage, stream.request_id), file=sys.stderr)
    return pieces.text()


class _Pieces:
    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)
        print(text, end="", flush=True)

    def end_line(self) -> None:
        if self._pieces and not self._pieces[-1].endswith("\n"):
            print(flush=True)

    def text(self) -> str:
        return "".join(self._pieces)


def _print_whole(answer: ChatCompletion | Completion, watch: Stopwatch, args: argparse.Namespace) -> None:
    print(answer.model_dump_json(indent=2, exclude_none=True) if args.json else answer.text)
    if args.stats:
        print(watch.line(answer.usage, answer.request_id), file=sys.stderr)


def _converse(client: Sluice, args: argparse.Namespace) -> int:
    """Holds a conversation until the end of input, and returns the exit code. Each message's answer is streamed.

    A failed turn leaves the conversation as it was.
    """
    options = _options(args)
    options["session"] = args.session or f"cli-{uuid.uuid4().hex}"
    system = _system(args)
    history: list[dict[str, str]] = []
    print("/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer.", file=sys.stderr)
    for line in _lines(args.prompt):
        command = line.strip()
        if command == "/exit":
            break
        if command == "/reset":
            history.clear()
            print("(a new conversation)", file=sys.stderr)
            continue
        if not command:
            continue
        turn = {"role": "user", "content": line}
        try:
            text = _print_stream(client.stream_chat([*system, *history, turn], **options), args)
        except SluiceError as error:
            report(error)
        except KeyboardInterrupt:
            complain("stopped; this turn is not part of the conversation")
        else:
            history += [turn, {"role": "assistant", "content": text}]
    return Exit.OK


def _lines(first: str | None) -> Iterable[str]:
    """Yields the first message, if given, then lines of standard input. A prompt sign is shown where a person types."""
    if first is not None:
        yield _utf8(first, "the prompt")
    if sys.stdin.isatty():
        _enable_line_editing()
    while True:
        try:
            yield _utf8(input("> ") if sys.stdin.isatty() else input(), "standard input")
        except EOFError:
            return


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it is what gives input() its history and editing
    except ImportError:
        return  # some platforms have none
