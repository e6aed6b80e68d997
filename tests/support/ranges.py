"""Ranges of a tool that keeps what it is told."""


class KeptRanges:
    """A tool that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.open: list[str] = []

    def prepare(self, name: str) -> str:
        return name

    def push(self, handle: str) -> None:
        self.open.append(handle)
        self.told.append("/".join(self.open))

    def pop(self) -> None:
        self.open.pop()
