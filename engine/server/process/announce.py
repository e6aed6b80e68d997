"""The ready line: what was decided, where the server answers, and where to look.

Knows how it is written: one log line for machines and services, and a small table for whoever
started the server by hand.
"""

import socket
import sys

from engine.log import get_logger
from engine.server.http.listening import address_of
from engine.server.state import ServerState

logger = get_logger(__name__)


def announce(state: ServerState, listener: socket.socket, startup_s: float) -> None:
    """Say that requests are served, in the log and, on a terminal, as a table too."""
    facts = ready_facts(state, listener, startup_s)
    logger.info("ready: %s", ", ".join(f"{name} {value}" for name, value in facts.items()))
    if sys.stdout is not None and sys.stdout.isatty():
        width = max(map(len, facts))
        lines = [f"  {name:<{width}}  {value}" for name, value in facts.items()]
        sys.stdout.write("\n" + "\n".join(lines) + "\n\n")
        sys.stdout.flush()


def ready_facts(state: ServerState, listener: socket.socket, startup_s: float) -> dict[str, str]:
    """What there is to say, by name, the most wanted first."""
    config, engine = state.config, state.engine
    ready, settings = engine.llm_engine.ready, engine.config
    address = address_of(listener, is_tls=config.ssl_certfile is not None)
    facts = {
        "address": address,
        "model": ", ".join(state.model_names),
        "dtype": ready.dtype,
        "device": ready.device,
        "attention": ready.attention_backend,
        "context": f"{ready.max_model_len:,} tokens",
        "KV cache": f"{ready.num_gpu_blocks * ready.block_size:,} tokens",
        "max_num_seqs": str(settings.scheduler.max_num_seqs),
        "API keys": str(len(state.keys)) if state.keys else "none: open to all who reach it",
    }
    base = "" if listener.family == socket.AF_UNIX else address  # no URL has a socket file in it
    if config.enable_live_page:
        facts["live page"] = f"{base}/"
    if not settings.observability.disable_log_stats:
        facts["metrics"] = f"{base}/metrics"
    if engine.run_dir is not None:
        facts["traces"] = engine.run_dir
    facts["start-up"] = f"{startup_s:.1f} s"
    return facts
