"""Finds sentences that cannot stand alone, in docstrings, comments and documents (`make lint-prose`).

A docstring must be understood without its neighbour's and without the code: it names its noun. Each rule below is a
pattern with which a noun was often missing. The check knows no grammar: what it passes may still be bad prose.

    python scripts/check_prose.py [FILE or FOLDER ...]      prints path:line: what is wrong; exits with 1 if anything is
    python scripts/check_prose.py --count                   findings by folder
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST_TRAILING = 40
"""Largest number of characters of a comment behind code; a longer one belongs above its line."""

OPENINGS = re.compile(
    r"(The same|The one that|Those|These|This|That|What|Who|Whose|Which|It|Its|They|Them|Their|And|But|Also|Likewise"
    r"|As above|Passed on|See the module|By id|To all|Else|Otherwise|So)\b(?!['’]s)"
)
"""First words of a docstring that point at a noun named elsewhere."""

PHRASES = {
    re.compile(r"\bso long\b(?! as)"): "`so long`: write `until then` or `meanwhile`",
    re.compile(r"\bso many\b(?! that)"): "`so many`: write `this many`, or name the number",
    re.compile(r"\bso much\b(?! that)(?! as)"): "`so much`: write `this much`, or name the amount",
    re.compile(r"\bfor ever\b"): "`for ever`: write `forever`, or `without end`",
    re.compile(r"\bas live\b"): "`as live`: write `as the live one does`",
    re.compile(r"\bis told\b"): "`is told`: write `is given` or `learns`",
}
UNSOURCED = re.compile(r"#\s*(tried|seen|found)\W*$")
DIRECTIVES = re.compile(r"#\s*(type:|noqa|fmt:|pragma|ruff:|ASSUMPTION)")
DOCUMENTS = (".md",)


class Finding(NamedTuple):
    """One complaint: a place, and what is wrong there."""

    path: str
    line: int
    message: str


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and text of every docstring; a string that follows an assignment documents it and counts as one."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for at, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            if isinstance(statement.value.value, str) and (
                at == 0 or isinstance(body[at - 1], ast.Assign | ast.AnnAssign)
            ):
                yield statement.lineno, statement.value.value


def in_text(text: str) -> Iterator[str]:
    """Yields complaints about phrases, wherever they occur."""
    for pattern, message in PHRASES.items():
        if pattern.search(text):
            yield message


def in_docstring(text: str) -> Iterator[str]:
    """Yields complaints about one docstring."""
    words = text.strip()
    if not words:
        yield "the docstring is empty"
        return
    opening = OPENINGS.match(words)
    if opening:
        yield f"the docstring opens with `{opening[0]}`: name the noun it is about"
    if "\n\n" not in words and not words.endswith((".", "?", "!", ":", "`")):
        yield "the docstring does not end as a sentence does"
    yield from in_text(words)


def in_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields complaints about comments, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        behind_code = bool(token.line[: token.start[1]].strip())
        if behind_code and len(token.string) > LONGEST_TRAILING and not DIRECTIVES.match(token.string):
            yield line, f"a comment of {len(token.string)} characters behind code: put it above the line"
        if UNSOURCED.match(token.string):
            yield line, "a constant needs its source, a formula, or the command that found it"
        for message in in_text(token.string):
            yield line, message


def check(path: Path) -> Iterator[Finding]:
    """Yields the findings of one file, in the order of its lines."""
    source = path.read_text(encoding="utf-8")
    found: list[tuple[int, str]] = []
    if path.suffix == ".py":
        for line, text in docstrings(ast.parse(source)):
            found += [(line, message) for message in in_docstring(text)]
        found += in_comments(source)
    else:
        for line, text in enumerate(source.splitlines(), start=1):
            found += [(line, message) for message in in_text(text)]
    for line, message in sorted(found):
        yield Finding(str(path), line, message)


def tracked(places: list[str]) -> list[Path]:
    """Returns the Python files and documents that git tracks below `places` (all of them if `places` is empty)."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *places], capture_output=True, text=True, check=True
    ).stdout
    files = [Path(name) for name in listed.splitlines() if not name.startswith("benchmarks/results/")]
    return [file for file in files if file.suffix in (".py", *DOCUMENTS) and file.is_file()]


def main(arguments: list[str]) -> int:
    """Prints the findings. Returns 1 if there are any, else 0."""
    counting = "--count" in arguments
    findings = [f for path in tracked([a for a in arguments if a != "--count"]) for f in check(path)]
    if counting:
        for folder, count in sorted(Counter("/".join(f.path.split("/")[:2]) for f in findings).items()):
            print(f"{count:6} {folder}")
    else:
        for finding in findings:
            print(f"{finding.path}:{finding.line}: {finding.message}")
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
