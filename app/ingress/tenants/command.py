"""`sluice key`: makes, lists, revokes and rotates the API keys in a key file. Running ingresses notice the change.

The entry point group `sluice.commands` loads `command`; `python -m app.ingress.tenants.command` is the same program.
"""

import argparse
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

from pydantic import ValidationError

from app.api.extensions import CLASSES, Ceiling
from app.ingress.tenants.key_file import KeyFileError, changed, read
from app.ingress.tenants.keys import Key, Keys, new_id, new_secret, now

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
GRACE = "24h"
"""Time for which the old secret of a rotated key is accepted beside the new one."""


class KeyCommand:
    """The subcommand `sluice key`. Its exit code is 0, or 2 if the file or an argument cannot be used."""

    name = "key"
    help = "create, list, revoke and rotate the API keys of clients"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments to `parser`."""
        shared = argparse.ArgumentParser(add_help=False)
        shared.add_argument(
            "--file", type=Path, metavar="PATH", default=os.environ.get("SLUICE_KEY_FILE") or None,
            help="the key file (default: $SLUICE_KEY_FILE)",
        )  # fmt: skip
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

        create = verbs.add_parser("create", parents=[shared], help="make a key and print its secret, once")
        create.add_argument("--tenant", required=True, help="whose key it is; a tenant may have several")
        create.add_argument("--note", default="", help="a word for whoever lists the keys")
        create.add_argument(
            "--ceiling", type=_ceiling, default="standard", metavar="CLASS|N",
            help=f"most urgent class ({', '.join(CLASSES)}) or priority that requests may ask for (standard)",
        )  # fmt: skip
        create.add_argument("--weight", type=float, default=1.0, help="share against other tenants (1)")
        create.add_argument("--requests-per-min", type=int, metavar="N", help="without it, any number")
        create.add_argument(
            "--tokens-per-min",
            type=int,
            metavar="N",
            help="tokens of prompts and answers; without it, any number",
        )
        create.add_argument(
            "--parallel", type=int, metavar="N", help="sequences at once; without it, any number"
        )
        create.add_argument(
            "--timeout-s", type=float, metavar="SECONDS",
            help="time that a request may take in all; without it, the server's request_timeout_s",
        )  # fmt: skip
        create.add_argument(
            "--expires-in", type=_duration, metavar="TIME", help="30d, 12h, 45m or 90s; without it, never"
        )
        create.add_argument(
            "--shares-cache", action="store_true",
            help="let requests find the KV of other keys that share theirs, not only their tenant's",
        )  # fmt: skip
        create.set_defaults(act=_create)

        listed = verbs.add_parser("list", parents=[shared], help="show the keys without their secrets")
        listed.add_argument("--json", action="store_true", help="one JSON object a line")
        listed.set_defaults(act=_list)

        revoke = verbs.add_parser(
            "revoke", parents=[shared], help="remove a key, which is refused from now on"
        )
        revoke.add_argument("id")
        revoke.set_defaults(act=_revoke)

        rotate = verbs.add_parser(
            "rotate", parents=[shared], help="give a key a new secret and print it, once"
        )
        rotate.add_argument("id")
        rotate.add_argument(
            "--grace", type=_duration, default=_duration(GRACE), metavar="TIME",
            help=f"time for which old secrets are accepted too ({GRACE}); 0s for none",
        )  # fmt: skip
        rotate.set_defaults(act=_rotate)

    def run(self, args: argparse.Namespace) -> int:
        """Does what the verb says, and returns the exit code."""
        if args.file is None:
            print("give the key file: --file PATH, or SLUICE_KEY_FILE in the environment", file=sys.stderr)
            return 2
        try:
            return int(args.act(args))
        except KeyFileError as error:
            print(error, file=sys.stderr)
        except ValidationError as error:
            for problem in error.errors():
                where = "--" + "-".join(str(part) for part in problem["loc"][:1]).replace("_", "-")
                print(f"{where}: {problem['msg']}" if problem["loc"] else problem["msg"], file=sys.stderr)
        return 2


def _create(args: argparse.Namespace) -> int:
    at, key_id = now(), new_id()
    secret, held = new_secret(key_id, at)
    key = Key(
        id=key_id,
        tenant=args.tenant,
        note=args.note,
        ceiling=args.ceiling,
        weight=args.weight,
        requests_per_min=args.requests_per_min,
        tokens_per_min=args.tokens_per_min,
        parallel=args.parallel,
        timeout_s=args.timeout_s,
        expires=None if args.expires_in is None else at + args.expires_in,
        shares_cache=args.shares_cache,
        created=at,
        secrets=(held,),
    )
    with changed(args.file, create=True) as file:
        file[0] = file[0].model_copy(update={"keys": (*file[0].keys, key)})
    _show(key_id, secret)
    return 0


def _list(args: argparse.Namespace) -> int:
    keys, _ = read(args.file)
    if args.json:
        for key in keys.keys:
            print(key.model_dump_json(exclude={"secrets"}))
        return 0
    rows: list[tuple[str, ...]] = [
        (
            "ID", "TENANT", "CEILING", "WEIGHT", "REQUESTS/MIN", "TOKENS/MIN", "PARALLEL", "TIMEOUT", "EXPIRES",
            "NOTE",
        )
    ]  # fmt: skip
    rows += [_row(key) for key in keys.keys]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(key: Key) -> tuple[str, ...]:
    def shown(value: object) -> str:
        return "-" if value is None else str(value)

    timeout = None if key.timeout_s is None else f"{key.timeout_s:g}s"
    expires = None if key.expires is None else key.expires.isoformat(timespec="seconds")
    if key.expired(time.time()):
        expires = f"{expires} (over)"
    return (
        key.id, key.tenant, str(key.ceiling), f"{key.weight:g}", shown(key.requests_per_min),
        shown(key.tokens_per_min), shown(key.parallel), shown(timeout), shown(expires), key.note,
    )  # fmt: skip


def _revoke(args: argparse.Namespace) -> int:
    with changed(args.file) as file:
        _of(file[0], args.id, args.file)
        kept = tuple(key for key in file[0].keys if key.id != args.id)
        file[0] = file[0].model_copy(update={"keys": kept})
    print(f"{args.id} is revoked; running ingresses refuse it within some seconds")
    return 0


def _rotate(args: argparse.Namespace) -> int:
    at = now()
    secret, held = new_secret(args.id, at)
    with changed(args.file) as file:
        key = _of(file[0], args.id, args.file)
        until = at + args.grace
        old = [
            each
            if each.expires is not None and each.expires < until
            else each.model_copy(update={"expires": until})
            for each in key.secrets
            if each.expires is None or each.expires > at
        ]
        if args.grace <= timedelta(0):
            old = []
        rotated = key.model_copy(update={"secrets": (*old, held)})
        keys = tuple(rotated if each.id == args.id else each for each in file[0].keys)
        file[0] = file[0].model_copy(update={"keys": keys})
    _show(args.id, secret)
    if old:
        print(
            f"the secret before it is accepted until {until.isoformat(timespec='seconds')}", file=sys.stderr
        )
    return 0


def _of(keys: Keys, key_id: str, path: Path) -> Key:
    for key in keys.keys:
        if key.id == key_id:
            return key
    raise KeyFileError(f"there is no key {key_id} in {path}: `sluice key list` shows the ids")


def _show(key_id: str, secret: str) -> None:
    """Prints the secret alone on standard output, so that a script can take it."""
    print(f"key {key_id}; its secret is shown only now:", file=sys.stderr)
    print(secret)


def _ceiling(text: str) -> Ceiling:
    if text in CLASSES:
        return text  # type: ignore[return-value]  # one of them
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a class nor a whole number") from None


def _duration(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 30d, 12h, 45m or 90s")
    return timedelta(seconds=int(found[1]) * _UNITS_S[found[2]])


command = KeyCommand()


def main(argv: list[str] | None = None) -> int:
    """Runs the command on its own."""
    parser = argparse.ArgumentParser(prog="sluice key", description=command.help)
    command.configure(parser)
    return command.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
