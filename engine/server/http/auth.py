"""API keys: where they come from, and whether a request has one.

Keeps digests only, so that no key shows up in a log, a traceback or a settings page. Knows nothing
of which routes ask for a key.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ConfigError
from engine.log import get_logger
from engine.server.config import ServerConfig

logger = get_logger(__name__)

KEY_VARIABLE = "ISINGLASS_API_KEY"
"""Environment variable with keys, separated by commas."""


class ApiKeys:
    """The keys of one server. Without any, everybody is let in."""

    __slots__ = ("_digests", "_salt")

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._salt = secrets.token_bytes(32)
        self._digests = tuple({self._digest(key.encode()): None for key in keys})

    def __len__(self) -> int:
        return len(self._digests)

    def accept(self, authorization: bytes | None) -> bool:
        """Whether the value of an Authorization header is `Bearer` and one of the keys.

        The time that this takes depends neither on how much of a key is right nor on which.
        """
        if not self._digests:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = self._digest(key.strip())
        is_known = False
        for known in self._digests:  # every one of them, found or not
            is_known |= hmac.compare_digest(known, digest)
        return is_known and scheme.lower() == b"bearer"

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()


def load_api_keys(config: ServerConfig) -> ApiKeys:
    """The keys of the flag, of the environment and of the file, together.

    Raises:
        ConfigError: a key is empty, or the file cannot be read or holds none.
    """
    keys = [_checked(key, "--api-key") for key in config.api_key]
    if KEY_VARIABLE in os.environ:
        keys += [_checked(key, KEY_VARIABLE) for key in os.environ[KEY_VARIABLE].split(",")]
    if config.api_key_file is not None:
        keys += _read_keys(Path(config.api_key_file))
    return ApiKeys(keys)


def warn_of_readers(config: ServerConfig) -> None:
    """Say it in the log where others than the owner may read the file of keys."""
    path = config.api_key_file
    if path is not None and Path(path).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("other users can read the API keys in %s; chmod 600 it", path)


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {str(path)!r} cannot be read: {error}") from error
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {str(path)!r} holds no key; write one a line.")
    return [_checked(key, str(path)) for key in keys]


def _checked(key: str, source: str) -> str:
    key = key.strip()
    if not key:
        raise ConfigError(f"an API key from {source} is empty, which anybody could present.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"an API key from {source} has characters that no header can carry; use printable "
            "ASCII without spaces."
        )
    return key
