"""Where a load goes and how it arrives: the settings of one run, checked.

Knows which settings contradict each other. Does not know prompts, nor how anything is sent.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from engine.errors import ConfigError

_SECRET = frozenset({"api_key", "headers"})
_OWN_BODY_KEYS = frozenset({"model", "prompt", "messages", "stream", "stream_options"})
_OWN_HEADERS = frozenset(
    {"content-length", "content-encoding", "transfer-encoding", "expect", "x-request-id"}
)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*")
_REQUEST_ID_PREFIX = re.compile(r"([!-~][ -~]*)?")
_MIN_RATE, _MAX_RATE = 1e-6, 1e9
_MIN_BURSTINESS, _MAX_BURSTINESS = 1e-3, 1e6
"""Beyond these, gaps are no numbers any more."""


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
    """Sent with every request; they win over what the generator sets by itself."""
    api_key: str | None = None
    """Sent as a bearer token, unless `headers` has an Authorization of its own."""
    request_id_prefix: str = "bench-"
    timeout_s: float = 600.0
    """From sending a request to the end of its stream."""
    ready_timeout_s: float = 60.0
    """How long to wait for the server to be ready before anything is sent."""
    insecure: bool = False
    """Do not verify TLS certificates."""

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        if self.endpoint not in ("completions", "chat"):
            raise ConfigError(f"endpoint must be completions or chat, not {self.endpoint!r}")
        if self.model == "":
            raise ConfigError("model must be a name; leave it out for the server's first")
        self._check_load()
        _check_headers(self.headers, self.api_key)
        if not _REQUEST_ID_PREFIX.fullmatch(self.request_id_prefix):
            raise ConfigError(
                "request_id_prefix must be printable ASCII and not begin with a space, "
                f"not {self.request_id_prefix!r}"
            )
        check_body_keys(self.extra_body, _OWN_BODY_KEYS, "extra_body")

    def _check_load(self) -> None:
        if self.num_prompts is None and self.duration_s is None:
            raise ConfigError("give num_prompts or duration, or the run has no end")
        for name in ("num_prompts", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name in ("timeout_s", "duration_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, not {value}")
        if not (_MIN_RATE <= self.request_rate <= _MAX_RATE or self.request_rate == math.inf):
            raise ConfigError(
                f"request_rate must be from {_MIN_RATE:g} to {_MAX_RATE:g} a second, or inf, "
                f"not {self.request_rate}"
            )
        if not _MIN_BURSTINESS <= self.burstiness <= _MAX_BURSTINESS:
            raise ConfigError(
                f"burstiness must be from {_MIN_BURSTINESS:g} to {_MAX_BURSTINESS:g}, "
                f"not {self.burstiness}"
            )
        if self.burstiness != 1 and math.isinf(self.request_rate):
            raise ConfigError("burstiness shapes the gaps of a request_rate; give one")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be a number of at least 0, not {self.temperature}")
        for name in ("num_warmups", "ready_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}")
        if math.isinf(self.request_rate) and self.num_prompts is None and not self.closed_loop:
            raise ConfigError(
                "a burst (infinite request_rate) needs num_prompts, or max_concurrency to make "
                "it a closed loop"
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


def check_body_keys(body: Mapping[str, Any], own_keys: Collection[str], place: str) -> None:
    """Refuse more keys of a request's body that would break what is measured.

    Raises:
        ConfigError: one is among `own_keys`, asks for several sequences, or is no JSON.
    """
    own = sorted(set(own_keys) & body.keys())
    if own:
        raise ConfigError(f"{place} may not set {', '.join(own)}")
    for name in ("n", "best_of"):
        if body.get(name, 1) != 1:
            raise ConfigError(
                f"{place} may not set {name} to anything but 1: gaps between tokens are measured "
                "on one sequence per request"
            )
    try:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place} cannot be sent as JSON: {error}") from error


def _check_url(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url must begin with http:// or https://: {url!r}")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        whole = bool(host) and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:  # brackets, port, a label that is too long
        whole = False
    if not whole:
        raise ConfigError(f"base_url must be scheme://host:port, and it is {url!r}")
    if "@" in parts.netloc:
        # It stands in the report. Not quoted, for the same reason.
        raise ConfigError("base_url may hold no user or password; give --header Authorization=…")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ConfigError(f"base_url may hold no query and no fragment: {url!r}")


def _check_headers(headers: Mapping[str, str], api_key: str | None) -> None:
    """Refuse what HTTP cannot carry; no value is quoted, it may be a secret."""
    seen: set[str] = set()
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of a header: letters, digits and !#$%&'*+-.^_`|~ only"
            )
        if name.lower() in _OWN_HEADERS:
            instead = "; use request_id_prefix" if name.lower() == "x-request-id" else ""
            raise ConfigError(f"headers may not set {name}{instead}")
        if name.lower() in seen:
            raise ConfigError(f"headers name {name} twice")
        seen.add(name.lower())
        if not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"the value of header {name} must be text without control characters")
    if api_key is not None and not (api_key.strip() and _HEADER_VALUE.fullmatch(api_key)):
        raise ConfigError(
            "api_key (or OPENAI_API_KEY) must be text without control characters, and not empty"
        )
