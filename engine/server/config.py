"""Every setting of the server: documented, validated, and the source of `isinglass serve`'s flags.

Knows options and their ranges. The engine's own settings are in `engine.config`.
"""

from dataclasses import dataclass, fields
from typing import Any

from engine.config import check_setting
from engine.errors import ConfigError
from instrumentation import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, whom it serves, and what it refuses."""

    # Listening.
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    uds: str | None = option(None, "Listen on this Unix socket instead of host and port.")
    root_path: str = option("", "Path prefix that a proxy in front of the server has taken off.")
    api_server_count: int = option(
        1, "Frontend processes over one engine core.", minimum=1, maximum=64
    )
    # The model's face.
    served_model_name: tuple[str, ...] = option(
        (), "Names that requests may use for the model. Default: the model's own."
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own, which then runs in a sandbox."
    )
    chat_template: str | None = option(
        None, "Jinja file, or text, in place of the model's chat template."
    )
    enable_auto_tool_choice: bool = option(
        True, 'Let the model decide on tools where tool_choice is "auto".'
    )
    tool_call_parser: str = option(
        "auto", "How tool calls are read from text; auto: by the model's chat template."
    )
    reasoning_parser: str = option(
        "auto", "How reasoning is read from text; auto: by the model's chat template, none: never."
    )
    # Access.
    api_key: tuple[str, ...] = option(
        (), "Keys that clients must present (any of them); also ISINGLASS_API_KEY."
    )
    api_key_file: str | None = option(None, "File with one key a line.")
    guard_metrics: bool = option(False, "Ask for the key at /metrics and /load too.")
    allowed_origins: tuple[str, ...] = option((), "Origins that browsers may call from (CORS).")
    allowed_methods: tuple[str, ...] = option(("*",), "Methods allowed to them.")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers allowed to them.")
    allow_credentials: bool = option(False, "Allow them credentials.")
    ssl_keyfile: str | None = option(None, "TLS: file of the private key.")
    ssl_certfile: str | None = option(None, "TLS: file of the certificate chain.")
    ssl_ca_certs: str | None = option(
        None, "TLS: file of authorities; clients must show a certificate that one of them signed."
    )
    # Limits.
    max_body_bytes: int = option(
        4 << 20,
        "Largest request body; a larger one gets 413. The event loop serves nobody else while it "
        "reads one: a few milliseconds for each MiB of text, some fifty for one of short names.",
        minimum=1 << 10,
    )
    max_header_bytes: int = option(
        64 << 10, "Most bytes of a request's line and headers.", minimum=1 << 10
    )
    max_connections: int | None = option(
        None,
        "Open connections of each frontend process; more get 503. Default: what the limit on open "
        "files leaves.",
        minimum=1,
    )
    timeout_read_s: float = option(
        20.0,
        "Seconds that a request's headers may take to arrive, and its body beyond one second for "
        "each KiB of it.",
        minimum=0.1,
        maximum=3600.0,
    )
    max_prompts: int = option(1024, "Most prompts in one request.", minimum=1)
    max_num_queued_reqs: int | None = option(
        None,
        "Requests that may wait for the engine beyond its free places (max_num_seqs less those "
        "that run); more get 429.",
        minimum=1,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Prompt tokens that may wait for the engine beyond what its next step has room for; more "
        "get 429.",
        minimum=1,
    )
    timeout_keep_alive_s: int = option(
        5, "Seconds that an idle connection is kept.", minimum=0, maximum=3600
    )
    # Life.
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get after SIGTERM.", minimum=0.0, maximum=86400.0
    )
    warm_up_structured_outputs: bool = option(
        True,
        "Get ready for the first structured output once the server is: some seconds of one "
        "processor, and a process of some 300 MB; otherwise with the first.",
    )
    keep_alive_on_engine_death: bool = option(
        False, "Go on answering (with 503) when the engine has died, instead of ending."
    )
    # What is shown.
    enable_debug_routes: bool = option(
        True, "Serve /debug/*, /start_profile, /start_trace, /reset_prefix_cache, /server_info."
    )
    enable_live_page: bool = option(True, "Serve the live view at /.")
    enable_docs: bool = option(True, "Serve the API's description at /docs and /openapi.json.")
    disable_access_log: bool = option(False, "Write no line for each request.")
    enable_request_id_headers: bool = option(
        True, "Answer with X-Request-Id, taken from the request where it has one."
    )

    @property
    def limits_queue(self) -> bool:
        """Whether it is limited what may wait for the engine."""
        return self.max_num_queued_reqs is not None or self.max_num_queued_tokens is not None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: names the field, its value and what is allowed.
        """
        for spec in fields(self):
            check_setting(spec.name, getattr(self, spec.name), spec.type, spec.metadata)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile go together; give both or neither.")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs needs ssl_certfile and ssl_keyfile.")
        if self.uds is not None:
            self._refuse(("host", "port"), "has no meaning beside uds; leave it out.")
        if not self.allowed_origins:
            cors = ("allowed_methods", "allowed_headers", "allow_credentials")
            self._refuse(cors, "needs allowed_origins: no origin is allowed without.")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raise ConfigError if any of these is not as it is by default."""
        for spec in fields(self):
            if spec.name in names and getattr(self, spec.name) != spec.default:
                raise ConfigError(f"{spec.name} {why}")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "ServerConfig":
        """Build it from flags; lists become tuples.

        Raises:
            ConfigError: a wrong setting.
        """
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in kwargs.items()
        }
        return cls(**settings)
