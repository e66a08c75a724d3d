"""Settings of one ingress replica. `app`'s YAML is parsed elsewhere; here the values are plain and checked
once.
"""

from dataclasses import dataclass, field

from app.api.extensions import PRIORITY_OF_CLASS, ClassSlo


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Raises ValueError for a value out of range.

    `served_names`: the names that the API accepts for the one model behind it; the first is the one it
    answers with.
    """

    served_names: tuple[str, ...]
    replica_id: str = "ingress-0"
    max_body_bytes: int = 32 * 2**20  # a prompt of 1 M token ids is 7 MB of JSON
    max_in_flight: int = 4096  # requests; each may hold several sequences
    request_timeout_s: float = 600.0
    max_retries: int = 2
    lease_margin_s: float = (
        2.0  # a pooled request is given up this long before its lease ends (at most 1/5 of the lease)
    )
    slow_client_bytes: int = 2**20  # unread output of one stream after which its client counts as gone
    progress_interval_s: float = 0.02
    sweep_interval_s: float = 0.1
    offload_prompt_chars: int = 16_384  # longer text is tokenised in a thread
    default_completion_tokens: int = 16  # OpenAI's default for /v1/completions
    expects_prefill: bool = False  # the deployment has prefill engines: not ready before the first of them is
    class_slo: dict[str, ClassSlo] = field(default_factory=dict)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # see `app.ingress.admin`

    def __post_init__(self) -> None:
        checks = [
            (
                len(self.served_names) >= 1 and all(self.served_names),
                "served_names must hold at least one name",
            ),
            (self.max_body_bytes >= 1024, "max_body_bytes must be >= 1024"),
            (self.max_in_flight >= 1, "max_in_flight must be >= 1"),
            (self.request_timeout_s > 0, "request_timeout_s must be > 0"),
            (self.max_retries >= 0, "max_retries must be >= 0"),
            (self.lease_margin_s > 0, "lease_margin_s must be > 0"),
            (self.slow_client_bytes >= 1, "slow_client_bytes must be >= 1"),
            (self.progress_interval_s > 0, "progress_interval_s must be > 0"),
            (self.sweep_interval_s > 0, "sweep_interval_s must be > 0"),
            (self.default_completion_tokens >= 1, "default_completion_tokens must be >= 1"),
            (
                all(len(key) >= 8 and key.isascii() and key.isprintable() for key in self.admin_keys),
                "admin_keys must be printable ASCII of at least 8 characters each",
            ),
            (
                set(self.class_slo) <= set(PRIORITY_OF_CLASS),
                f"class_slo: classes are {', '.join(PRIORITY_OF_CLASS)}",
            ),
        ]
        for ok, message in checks:
            if not ok:
                raise ValueError(f"ingress: {message}")
