"""How a process finds a core that another one owns."""

import msgspec


class CoreAttachment(msgspec.Struct, frozen=True, kw_only=True):
    """Plain values, handed to a frontend's process when it starts."""

    directory: str
    """The private folder with the sockets of all clients."""
    client_index: int
    """Which of the core's clients the frontend is; 0 is the core's owner."""
    first_request_num: int
    """Numbers of requests from here on are the frontend's own."""
    core_pid: int
    began_ns: int
    """When the owner began to start (monotonic)."""
    death_fd: int
    """An inherited descriptor that becomes readable when the core, or its owner, has ended."""
    counts_steps: bool = True
    """Whether this frontend's metrics count the core's steps: one of them does."""
    life: int = 0
    """How many frontends were this client before, each of which has died."""
    run_dir: str | None = None
    """Folder of the run that the core records into from the start."""

    @property
    def title(self) -> str:
        """What the frontend's process is called, in every life."""
        return f"ApiServer_{self.client_index}"

    @property
    def is_first(self) -> bool:
        """Whether the frontend says what all of them would: the first one, in its first life."""
        return self.client_index == 1 and self.life == 0
