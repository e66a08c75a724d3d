"""Every request that is shown to a reader bounds its answer.

Without `max_tokens` a small model may talk to the end of its context: 4,059 tokens, some minutes on two cores.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHOWN = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/**/*",
        "scripts/*",
        "app/serve.py",
        "sluice/__init__.py",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in (".md", ".py", ".sh") and path.name != "CHANGELOG.md"
)

# A request from its beginning to its end: a body in braces, a call of the SDK or of `openai`, a line of shell.
REQUESTS = re.compile(
    r"""\{[^{}]*"(?:messages|prompt)":(?:[^{}]|\{[^{}]*\})*\}"""
    r"""|\.(?:chat|complete|stream_chat|stream_complete|completions\.create)\((?:[^()]|\([^()]*\))*\)"""
    r"""|^[^\n]*\bsluice (?:chat|complete) [^\n]*$""",
    re.MULTILINE,
)


def requests_of(text: str) -> list[str]:
    """The requests in a text, shell's continued lines joined."""
    return [found.group() for found in REQUESTS.finditer(text.replace("\\\n", " "))]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shown_request_bounds_its_answer(path: Path) -> None:
    unbounded = [text for text in requests_of(path.read_text()) if not re.search(r"max.tokens", text)]
    assert not unbounded, f"{path.relative_to(ROOT)}: add max_tokens to {unbounded}"


def test_the_pattern_finds_what_a_reader_would_copy() -> None:
    assert (
        requests_of("""curl -d '{"messages": [{"role": "user", "content": "hi"}], "stream": true}'""") != []
    )
    assert requests_of('client.chat("hello", temperature=0)\nclient.chat.completions.create(model="m")') != []
    assert requests_of(".venv/bin/sluice chat \\\n  --temperature 0 hello") != []
    assert requests_of((ROOT / "README.md").read_text()) != []
    assert requests_of((ROOT / "app" / "serve.py").read_text()) != []
