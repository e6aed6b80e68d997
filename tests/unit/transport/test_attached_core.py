"""A core of another process's that does not answer: waiting for it ends when nobody wants it."""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.errors import EngineDeadError, EngineStartError
from engine.transport.attached_core import AttachedCore
from engine.transport.mp_client import SyncMPClient
from engine.types.attachment import CoreAttachment
from instrumentation import NULL
from tests.waiting import PATIENCE_S


@contextlib.contextmanager
def silent_core(*, connects: bool) -> Iterator[tuple[CoreAttachment, int]]:
    """How to attach to one that says nothing, and what is closed when it ends."""
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        death_read, death_write = os.pipe()
        attachment = CoreAttachment(
            directory=folder,
            client_index=1,
            first_request_num=0,
            core_pid=1,
            began_ns=0,
            death_fd=death_read,
        )
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            if connects:
                socket.connect(f"ipc://{folder}/input.1")
            yield attachment, death_write
        os.close(death_read)


@pytest.mark.parametrize("connects", [False, True])
def test_the_wait_for_a_core_that_does_not_come_up_can_be_ended(connects: bool) -> None:
    with silent_core(connects=connects) as (attachment, death_write), ThreadPoolExecutor(1) as pool:
        num_files = len(list(Path("/proc/self/fd").iterdir()))
        client = SyncMPClient(lambda: AttachedCore(attachment, obs=NULL), timeout_s=2 * PATIENCE_S)
        waiting = pool.submit(client.wait_ready)
        time.sleep(0.2)
        assert not waiting.done()
        client.kill()
        assert isinstance(waiting.exception(PATIENCE_S), EngineStartError)
        assert "shut down" in str(client.core.death())
        client.shutdown()
        client.kill()
        if not connects:  # else the socket above has descriptors that come and go
            assert len(list(Path("/proc/self/fd").iterdir())) == num_files
        os.close(death_write)


def test_the_end_of_the_core_is_noticed_by_every_client() -> None:
    with silent_core(connects=True) as (attachment, death_write):
        told = [threading.Event(), threading.Event()]
        cores = [
            AttachedCore(
                msgspec.structs.replace(attachment, client_index=index),
                obs=NULL,
                on_death=event.set,
            )
            for index, event in enumerate(told, 1)
        ]
        assert not any(one.is_dead for one in cores)
        assert not cores[0].poll(cores[0].input, 0.01)
        os.close(death_write)
        for core, event in zip(cores, told, strict=True):
            assert event.wait(PATIENCE_S)
            assert core.is_dead
            assert not core.poll(core.output, 30)
            assert isinstance(core.death(), EngineDeadError)
            assert "died" in str(core.death())
            core.close()
