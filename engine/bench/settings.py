"""Where a load goes and how it arrives: the settings of one run, checked.

Knows which settings contradict each other. Does not know prompts, nor how anything is sent.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from engine.errors import ConfigError

_SECRET = frozenset({"api_key", "headers"})
_OWN_BODY_KEYS = frozenset({"model", "prompt", "messages", "stream", "stream_options"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """One run of the load generator.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """

    base_url: str
    """Scheme, host and port; a trailing `/v1` is taken off."""
    endpoint: Literal["completions", "chat"] = "completions"
    model: str | None = None
    """None: the first that `/v1/models` names."""
    num_prompts: int | None = 1000
    """Requests to send; None only with a duration."""
    duration_s: float | None = None
    """Send no request that is due later than this after the start."""
    request_rate: float = math.inf
    """Requests per second of an open loop."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps; 1 is a Poisson process."""
    max_concurrency: int | None = None
    """Requests in flight at most; with an infinite rate this makes a closed loop."""
    num_warmups: int = 0
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    api_key: str | None = None
    request_id_prefix: str = "bench-"
    timeout_s: float = 600.0
    """From sending a request to the end of its stream."""
    ready_timeout_s: float = 60.0
    """How long to wait for the server to be ready before anything is sent."""
    insecure: bool = False
    """Do not verify TLS certificates."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://: {self.base_url!r}")
        if self.endpoint not in ("completions", "chat"):
            raise ConfigError(f"endpoint must be completions or chat, not {self.endpoint!r}")
        if self.num_prompts is None and self.duration_s is None:
            raise ConfigError("give num_prompts or duration, or the run has no end")
        for name in ("num_prompts", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name in ("request_rate", "burstiness", "timeout_s", "duration_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, not {value}")
        if math.isinf(self.burstiness):
            raise ConfigError("burstiness must be finite")
        if self.burstiness != 1 and math.isinf(self.request_rate):
            raise ConfigError("burstiness shapes the gaps of a request_rate; give one")
        if self.num_warmups < 0 or self.ready_timeout_s < 0:
            raise ConfigError("num_warmups and ready_timeout must not be negative")
        if math.isinf(self.request_rate) and self.num_prompts is None and not self.closed_loop:
            raise ConfigError(
                "a burst (infinite request_rate) needs num_prompts, or max_concurrency to make "
                "it a closed loop"
            )
        own = _OWN_BODY_KEYS & self.extra_body.keys()
        if own:
            raise ConfigError(f"extra_body may not set {', '.join(sorted(own))}")
        for name in ("n", "best_of"):
            if self.extra_body.get(name, 1) != 1:
                raise ConfigError(
                    f"extra_body may not set {name} above 1: gaps between tokens are measured on "
                    "one sequence per request"
                )

    @property
    def closed_loop(self) -> bool:
        """Whether requests are sent as earlier ones end, not by the clock."""
        return math.isinf(self.request_rate) and self.max_concurrency is not None

    @property
    def root_url(self) -> str:
        """The base URL without `/v1` and slashes at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def url(self) -> str:
        """Where requests are posted."""
        path = "chat/completions" if self.endpoint == "chat" else "completions"
        return f"{self.root_url}/v1/{path}"

    def arrival(self) -> str:
        """The arrival process in words."""
        limit = f", at most {self.max_concurrency} in flight" if self.max_concurrency else ""
        if self.closed_loop:
            return f"closed loop of {self.max_concurrency}"
        if math.isinf(self.request_rate):
            return "burst: all at once"
        kind = "Poisson" if self.burstiness == 1 else f"gamma (burstiness {self.burstiness:g})"
        return f"{kind}, {self.request_rate:g} requests/s{limit}"

    def document(self) -> dict[str, object]:
        """The settings for a report, without secrets; an infinite rate is the word `inf`."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: "inf" if isinstance(value, float) and math.isinf(value) else value
            for name, value in values.items()
            if name not in _SECRET
        }
