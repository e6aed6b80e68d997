"""The shell blocks of the serving guide, run as they stand."""

import re
import subprocess

import pytest

from tests.support.scripts import ROOT
from tests.support.server_process import ServerProcess
from tests.waiting import PATIENCE_S

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block: str, embedded_server: ServerProcess) -> None:
    done = subprocess.run(
        ["bash", "-euc", f"URL={embedded_server.url}\n{block.replace('curl ', 'curl --fail ')}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"object"' in done.stdout or '"tokens"' in done.stdout


def test_guide_has_something_to_run() -> None:
    assert len(BLOCKS) >= 3
