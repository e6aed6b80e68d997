"""Makes one Chrome trace of the parts of a profile, on one clock. A program of its own.

The engine core runs it as another process, because everything in its own would hold steps up. After
a core's death, `python -m instrumentation.profile.merge PROFILE.parts` saves what was written.

The profiler converts a cycle counter to the wall clock anew for each part. The anchors are ranges
whose begin and end the profiler saw, and which lie between two readings of CLOCK_MONOTONIC; so each
of them bounds the offset between the two clocks from both sides.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from instrumentation.labels import is_step_label
from instrumentation.profile.files import (
    ANCHOR_NAME,
    ITERATION_PREFIX,
    MANIFEST_NAME,
    ProfileClock,
    ProfileManifest,
    ProfilePart,
)

_ROUNDING_NS = 2
"""The profiler's times are doubles of µs, near the end of what those resolve."""


class Offset:
    """CLOCK_MONOTONIC less the profiler's clock within one part, in nanoseconds."""

    def __init__(
        self, ranges_ns: list[tuple[int, int]], readings_ns: list[tuple[int, int]]
    ) -> None:
        """Take the anchors' begins and ends by the profiler, and the readings around them.

        The first half was taken at the part's begin, the second at its end. The clocks drift
        evenly in between, so the offset stays between those of the two tightest anchors.

        Raises:
            ValueError: the profiler has not recorded every anchor.
        """
        if len(ranges_ns) != len(readings_ns) or len(ranges_ns) < 2:
            raise ValueError(
                f"the profiler recorded {len(ranges_ns)} of {len(readings_ns)} clock anchors"
            )
        bounds = [
            (before - begin, after - end)
            for (begin, end), (before, after) in zip(ranges_ns, readings_ns, strict=True)
        ]
        half = len(bounds) // 2
        tightest = [
            min(some, key=lambda bound: bound[1] - bound[0])
            for some in (bounds[:half], bounds[half:])
        ]
        low = min(min(bound) for bound in tightest)
        high = max(max(bound) for bound in tightest)
        self.offset_ns = (low + high) // 2
        self.error_ns = (high - low + 1) // 2 + _ROUNDING_NS


def merge(folder: Path) -> ProfileClock:
    """Write the file that the folder's manifest names, and remove the folder.

    Raises:
        ValueError: a part is not what the profiler writes.
        OSError: a file cannot be read or written.
    """
    manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=ProfileManifest)
    output = Path(manifest.output)
    unfinished = output.with_name(output.name + ".unfinished")
    with unfinished.open("wb") as stream:
        clock = _write(stream, folder, manifest)
    unfinished.replace(output)
    shutil.rmtree(folder)
    return clock


def _write(stream: BinaryIO, folder: Path, manifest: ProfileManifest) -> ProfileClock:
    encode = msgspec.json.encode
    base_ns = offset_ns = error_ns = 0
    seen: set[bytes] = set()
    separator = b""
    num_steps = 0
    for index, part in enumerate(manifest.parts):
        document = msgspec.json.decode((folder / part.file).read_bytes())
        part_base_ns = document.pop("baseTimeNanoseconds")
        events = document.pop("traceEvents")
        own = _offset(events, part_base_ns, part)
        error_ns = max(error_ns, own.error_ns)
        if index == 0:
            offset_ns = own.offset_ns
            # Near the first event, so that the times are small numbers.
            base_ns = (manifest.begin_ns - offset_ns) // 1_000_000 * 1_000_000
            _write_head(stream, document, manifest, base_ns)
        shift_ns = part_base_ns + own.offset_ns - offset_ns - base_ns
        for event in _shifted(events, shift_ns, seen):
            stream.write(separator + encode(event))
            separator = b",\n"
            if _is_step(event):
                # The name by which readers of torch's profiles know iterations.
                twin = event | {"name": f"{ITERATION_PREFIX}{num_steps}"}
                stream.write(separator + encode(twin))
                num_steps += 1
    clock = ProfileClock(
        host=manifest.host,
        pid=manifest.pid,
        thread_id=manifest.thread_id,
        rank=manifest.rank,
        num_steps=sum(part.num_steps for part in manifest.parts),
        monotonic_offset_ns=offset_ns,
        clock_error_ns=error_ns,
        parts=manifest.parts,
    )
    stream.write(b'\n],\n"isinglass": ' + encode(clock) + b"}\n")
    return clock


def _write_head(
    stream: BinaryIO, document: dict[str, Any], manifest: ProfileManifest, base_ns: int
) -> None:
    """All but the events. Holistic Trace Analysis looks for the rank near the file's begin."""
    information = {
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "backend": manifest.backend,
    }
    head = {"schemaVersion": document.pop("schemaVersion", 1), "distributedInfo": information}
    head |= document | {"baseTimeNanoseconds": base_ns}
    text = msgspec.json.format(msgspec.json.encode(head), indent=2)
    stream.write(text.rstrip().removesuffix(b"}").rstrip() + b',\n"traceEvents": [\n')


def _is_step(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and is_step_label(event["name"])


def _offset(events: list[dict[str, Any]], base_ns: int, part: ProfilePart) -> Offset:
    ranges_ns = []
    for event in events:
        if event.get("name") == ANCHOR_NAME and event.get("ph") == "X":
            begin_ns = base_ns + round(event["ts"] * 1000)
            ranges_ns.append((begin_ns, begin_ns + round(event["dur"] * 1000)))
    return Offset(sorted(ranges_ns), part.anchors)


def _shifted(
    events: list[dict[str, Any]], shift_ns: int, seen: set[bytes]
) -> Iterator[dict[str, Any]]:
    """The events on the final file's clock: no anchors, names of threads and processes once."""
    for event in sorted(events, key=lambda event: event.get("ts", 0.0)):
        if event.get("name") == ANCHOR_NAME:
            continue
        if event.get("ph") == "M":
            key = msgspec.json.encode({name: event[name] for name in event if name != "ts"})
            if key in seen:
                continue
            seen.add(key)
        if "ts" in event:
            event["ts"] = (round(event["ts"] * 1000) + shift_ns) / 1000
        yield event


if __name__ == "__main__":
    os.nice(10)  # whatever the machine can spare
    print(msgspec.json.encode(merge(Path(sys.argv[1]))).decode())
