"""Messages about weights: an engine that starts asks the router who has them, and then reads them from that engine.

The bytes do not move over the wire but over NIXL. The reader asks for a piece (`policies.weights.checkpoint`), the
lender registers its memory for as long as the reader needs it and tells where it is, and the reader says when it has
read it.
"""

from actors.wire.messages.base import Part, Wire

WINDOW = 2
"""Most pieces that a reader may want at once, and hold at once: it reads one while the lender prepares another."""


class WeightsRead(Part, frozen=True):
    """How an engine that may read its weights from another one came to them: its `source` is "peer", or "disk" for the
    `reason`. `bytes` came from `peer`, within `seconds`.
    """

    source: str
    bytes: int = 0
    seconds: float = 0.0
    peer: str = ""
    reason: str = ""


class FindWeights(Wire, frozen=True):
    """Engine -> router: an engine that starts on `node` looks for others that lend the weights of `model`, by the name
    under which it is served.
    """

    node: str
    model: str


class WeightsAt(Wire, frozen=True):
    """Router -> engine, the answer: the addresses of each engine that lends them, the nearest first."""

    sources: tuple[tuple[str, ...], ...]


class AskWeights(Wire, frozen=True):
    """Reader -> lender, first message: what the reader's own files are (`checkpoint.difference`), and the addresses at
    which it lends what it has read.
    """

    fingerprint: str
    config: str
    addresses: tuple[str, ...]


class WeightsRefused(Wire, frozen=True):
    """Lender -> reader: it lends nothing, or nothing any more, for this reason. `instead` are the addresses of those
    who may, the best first.
    """

    reason: str
    instead: tuple[tuple[str, ...], ...] = ()


class WeightsLent(Wire, frozen=True):
    """Lender -> reader: its NIXL agent (opaque), the node whose egress port the bytes leave by, names and sizes of the
    files, how they are cut into pieces, and what they are. `path` are the ids of those from whom they come, the lender
    last, so that nobody reads from one who reads from it.
    """

    agent: bytes
    node: str
    files: tuple[tuple[str, int], ...]
    piece_bytes: int
    fingerprint: str
    config: str
    path: tuple[str, ...]


class WantPiece(Wire, frozen=True):
    """Reader -> lender: lend this piece as soon as it is there. The lender answers in the order of these."""

    piece: int


class PieceLent(Wire, frozen=True):
    """Lender -> reader: the piece lies at `address` of memory that `pages` (opaque) describes to NIXL, and has this
    hash. It stays there until PieceRead.
    """

    piece: int
    address: int
    pages: bytes
    digest: bytes


class PieceRead(Wire, frozen=True):
    """Reader -> lender: the piece has been read."""

    piece: int
