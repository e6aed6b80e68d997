"""What several unit tests share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from instrumentation.hooks import folder, progress, recording


@pytest.fixture
def hooks_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the hooks of this process write; their journals are closed afterwards."""
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "hooks"))
    monkeypatch.setattr(recording, "_instruments", {})
    monkeypatch.setattr(progress, "_probes", [])
    handler = signal.getsignal(signal.SIGUSR2)
    yield tmp_path / "hooks"
    signal.signal(signal.SIGUSR2, handler)
    for instrument in recording._instruments.values():
        instrument.close()
