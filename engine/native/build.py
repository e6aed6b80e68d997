"""Compiles the kernels, once for each version of their source.

    python -m engine.native.build

The library goes to the user's cache, since the package's own folder may be read-only and may be
shared by machines. Its name carries a digest of the sources and flags and one of the compiler, so
that a stale one is never loaded. Knows compilers and files; does not load what it has built.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.errors import ConfigError
from engine.log import get_logger

logger = get_logger(__name__)

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "c++", "clang++")
# What a processor must offer, as /proc/cpuinfo and the compiler call it.
CPU_FEATURES = {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512vl": "-mavx512vl",
    "avx512dq": "-mavx512dq",
    "avx512_bf16": "-mavx512bf16",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
    "fma": "-mfma",
    "3dnowprefetch": "-mprfchw",
}
# The warning is about the "undefined" vectors of GCC's own headers.
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno"),
    "-Wno-maybe-uninitialized",
)
TIMEOUT_S = 60.0


def cache_folder() -> Path:
    """Where libraries are kept: below XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "isinglass" / "native"


def find_library() -> Path | None:
    """The newest library that was built from these sources with these flags."""
    found = list(cache_folder().glob(f"kernels-{_digest_of_sources()}-*.so"))
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def build_library() -> Path:
    """Compile the kernels unless this compiler has done so before; a few seconds.

    Processes that want it at the same time wait for the first.

    Raises:
        ConfigError: there is no compiler, it fails, or the cache cannot be written to.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(f"there is no C++ compiler ({', '.join(COMPILERS)}) on the path")
    try:
        version = _run([compiler, "--version"]).stdout
        name = f"kernels-{_digest_of_sources()}-{_digest(version)}.so"
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / name).is_file():
                _compile(compiler, folder / name)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise ConfigError(f"the native kernels cannot be built: {detail[-2000:]}") from error
    return folder / name


def _compile(compiler: str, target: Path) -> None:
    began = time.monotonic()
    features = list(CPU_FEATURES.values())
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        object_path, library = Path(folder) / "decoder.o", Path(folder) / target.name
        source = str(SOURCES / "decoder.cpp")
        _run([compiler, *FLAGS, *features, "-c", source, "-o", str(object_path)])
        # Not linked with -fopenmp: its symbols must come from the runtime that PyTorch has loaded,
        # whatever its file is called, or two pools of threads would fight for the cores.
        _run([compiler, "-shared", str(object_path), "-o", str(library)])
        library.replace(target)
    logger.info("built %s in %.1f s", target, time.monotonic() - began)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - a compiler of the user's own path
        command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def _digest_of_sources() -> str:
    parts = [" ".join((*FLAGS, *CPU_FEATURES.values()))]
    parts += [f"{path.name}\n{path.read_text()}" for path in sorted(SOURCES.iterdir())]
    return _digest("\n".join(parts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    """Build, and say where the library is or why there is none; 0 either way.

    The engine works without it, so a set-up script need not stop.
    """
    try:
        sys.stdout.write(f"{build_library()}\n")
    except ConfigError as error:
        sys.stdout.write(f"no native kernels, PyTorch's will be used: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
