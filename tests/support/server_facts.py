"""What can be seen of a running server from outside: its counts, descriptors, memory and tasks.

Knows `/metrics`, `/debug/stacks` and `/proc`, and which counts must add up. Knows no load and no
fault.
"""

import contextlib
import os
import re
from collections import Counter
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server_process import ServerProcess
from tests.waiting import PATIENCE_S

_IDLE_TASKS = re.compile(
    r"run_asgi|RequestResponseCycle|Task-\d+|output handler|life|death|stop|http|start engine"
    r"|second signal|share"
)
"""Names of tasks that a server has which serves nobody but the one who asks."""


class Scrape:
    """One answer of `/metrics`."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of `isinglass_<name>` over all series that have these labels."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == f"isinglass_{name}" and labels.items() <= sample.labels.items()
        ]
        assert found, f"there is no metric {name} with {labels}"
        return sum(found)

    def values(self, name: str, label: str) -> dict[str, float]:
        """`isinglass_<name>` by the values of one label."""
        found: Counter[str] = Counter()
        for sample in self._samples:
            if sample.name == f"isinglass_{name}":
                found[sample.labels[label]] += sample.value  # type: ignore[assignment]
        return {key: float(value) for key, value in found.items()}

    @property
    def counters(self) -> dict[str, float]:
        """Every series that may only rise, by its name and labels."""
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for sample in self._samples
            if sample.name.endswith(("_total", "_count"))
        }


def scrape(url: str) -> Scrape:
    """The metrics as they are now."""
    answer = httpx.get(f"{url}/metrics", timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return Scrape(answer.text)


def check_arrivals(seen: Scrape) -> None:
    """Every arrival has exactly one outcome or is under way, for HTTP and for the engine."""
    arrived = seen.total("http_requests_arrived_total")
    in_flight = seen.total("http_requests_in_flight")
    assert arrived == seen.total("http_request_outcomes_total") + in_flight
    assert arrived == seen.total("http_requests_total") + in_flight
    refused = seen.values("http_request_outcomes_total", "outcome")["refused"]
    assert refused == seen.total("http_requests_refused_total")
    assert seen.total("requests_arrived_total") == (
        seen.total("requests_finished_total")
        + seen.total("requests_rejected_total")
        + seen.total("requests_in_flight")
    )


def check_idle(seen: Scrape) -> None:
    """Nothing is held for anybody; what steps made has been delivered."""
    assert seen.total("http_requests_in_flight") == 1, "only the scrape itself"
    for gauge in ("requests_in_flight", "requests_running", "requests_waiting"):
        assert seen.total(gauge) == 0, gauge
    blocks = seen.values("kv_blocks", "state")
    assert blocks["used"] == 0, blocks
    assert seen.total("engine_up") == 1
    assert seen.total("telemetry_negative_values_total") == 0
    # What a step made for a request whose client had just left is made, and delivered to nobody.
    undelivered = seen.total("sampled_tokens_total") - seen.total("generation_tokens_total")
    assert undelivered >= 0
    aborted = seen.values("requests_finished_total", "finish_reason")["abort"]
    assert undelivered <= 64 * aborted, f"{undelivered:g} tokens lost by {aborted:g} aborts"


def num_descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_connections(pid: int, port: int) -> int:
    """Open TCP connections of a process that came to a port of 127.0.0.1."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == f"0100007F:{port:04X}" and fields[3] == "01":  # established
            inodes.add(f"socket:[{fields[9]}]")
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(path) in inodes
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def command_of(pid: int) -> str:
    """A process's command line, as text; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def processes(server: ServerProcess) -> dict[str, int]:
    """Process ids of a server: `server`, `EngineCore` and any `ApiServer_<n>`."""
    found = {"server": server.process.pid}
    for pid in server.children():
        name = command_of(pid).rpartition(" ")[2]
        if re.fullmatch(r"EngineCore|ApiServer_\d+", name):  # else it is on its way in, or out
            found[name] = pid
    return found


def busy_tasks(url: str) -> list[str]:
    """Names of the server's asyncio tasks that an idle server does not have."""
    text = httpx.get(f"{url}/debug/stacks", timeout=PATIENCE_S).text
    names = re.findall(r"^task (.+)$", text, re.MULTILINE)
    assert names, text
    return [name for name in names if not _IDLE_TASKS.fullmatch(name)]
