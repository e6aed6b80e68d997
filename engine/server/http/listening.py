"""Where the server listens: TCP or a Unix socket, with or without TLS.

Knows sockets, socket files and certificates. Knows nothing of what is served.
"""

import contextlib
import os
import resource
import socket
import ssl
import stat
from collections.abc import Iterator

from engine.errors import ConfigError
from engine.server.config import ServerConfig

_BACKLOG = 2048
_WANTED_FILES = 1 << 16
_RESERVED_FILES = 256
"""Descriptors that are not for clients: the core's sockets, logs, journals, libraries."""


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A listening socket while the block runs; a socket file is removed behind it.

    Raises:
        ConfigError: the address is taken, or cannot be listened at.
    """
    if config.uds is None:
        with _listen_at_port(config.host, config.port) as listener:
            yield listener
        return
    with _listen_at_file(config.uds) as listener:
        inode = os.stat(config.uds).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(config.uds).st_ino == inode:  # else it is another server's by now
                    os.unlink(config.uds)


def address_of(listener: socket.socket, *, is_tls: bool) -> str:
    """The address as clients write it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The certificate and what is asked of clients; None without TLS.

    Raises:
        ConfigError: a file cannot be read, or key and certificate do not belong together.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def refuse_to_ask() -> str:
        raise ConfigError("ssl_keyfile is encrypted; give a key without a passphrase.")

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, refuse_to_ask)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError, ValueError) as error:  # a name with a NUL
        names = "ssl_certfile, ssl_keyfile" + (", ssl_ca_certs" if config.ssl_ca_certs else "")
        raise ConfigError(f"TLS cannot be set up from {names}: {error}") from error
    return context


def raise_file_limit() -> int:
    """Take as many open files as the system lets us; returns how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return max(files - _RESERVED_FILES, files // 2, 1)


def _listen_at_port(host: str, port: int) -> socket.socket:
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, ValueError) as error:  # a name too long, or one with a NUL
        raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        hint = " Use another --port, or 0 for any free one." if port else ""
        raise ConfigError(f"cannot listen at {host}:{port}: {error}.{hint}") from error
    return listener


def _listen_at_file(path: str) -> socket.socket:
    """A socket file that only its owner may use."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    finally:
        os.umask(mask)
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that is no more.

    Raises:
        ConfigError: a server listens there, or the file is no socket.
    """
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"uds {path!r} is a file, and no socket; give another path.")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
    except (OSError, ValueError) as error:  # a name with a NUL
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    else:
        raise ConfigError(f"cannot listen at {path}: another server listens there.")
