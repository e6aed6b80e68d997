"""One line for each HTTP request, when it has ended.

Knows the line's form. Probes, scrapes and the files of the live page are on the level
debug: they are no news.
"""

import logging
from typing import Any

from engine.log import get_logger
from engine.server.http.exchange import PROBES, ExchangeState
from engine.server.http.route_names import FILES_ROUTE, ICON_PATH, METRICS_PATHS

logger = get_logger("access")

_QUIET = PROBES | METRICS_PATHS | {FILES_ROUTE, ICON_PATH}


def log_exchange(exchange: ExchangeState) -> None:
    """Write the line, as a sentence or, with `log_format=json`, as fields too."""
    level = logging.DEBUG if exchange.route in _QUIET else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "client": exchange.client,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "refusal": exchange.refusal,
        "response_bytes": exchange.num_bytes,
        "duration_s": round(exchange.duration_ns / 1e9, 6),
        "prompt_tokens": exchange.num_prompt_tokens,
        "output_tokens": exchange.num_output_tokens,
    }
    if exchange.first_byte_ns:
        fields["first_byte_s"] = round((exchange.first_byte_ns - exchange.arrival_ns) / 1e9, 6)
    tokens = ""
    if exchange.num_output_tokens is not None:
        tokens = f", {exchange.num_prompt_tokens or 0} + {exchange.num_output_tokens} tokens"
    logger.log(
        level,
        '%s "%s %s" %d %s, %d bytes%s, %.3f s, id %s',
        exchange.client or "-",
        exchange.method,
        exchange.path,
        exchange.status,
        exchange.refusal or exchange.outcome,
        exchange.num_bytes,
        tokens,
        exchange.duration_ns / 1e9,
        exchange.request_id,
        extra={"fields": {name: value for name, value in fields.items() if value is not None}},
    )
