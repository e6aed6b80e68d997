"""Building the kernels: once for each version of the sources, never a stale one, one OpenMP."""

import re
import shutil
from pathlib import Path

import pytest
import torch  # noqa: F401 - brings the OpenMP runtime that the library must share

from engine.errors import ConfigError
from engine.native import build
from tests.support.native_support import needs_native

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build.cache_folder()


@needs_compiler
def test_built_once_and_again_when_a_source_changes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.find_library() is None
    path = build.build_library()
    assert path.parent == cache
    built_ns = path.stat().st_mtime_ns
    assert build.build_library() == build.find_library() == path
    assert path.stat().st_mtime_ns == built_ns
    sources = shutil.copytree(build.SOURCES, tmp_path / "src")
    with (sources / "rows.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.find_library() is None


@needs_compiler
def test_what_the_compiler_says_is_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = shutil.copytree(build.SOURCES, tmp_path / "src")
    (sources / "decoder.cpp").write_text("int f() { return nonsense; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(ConfigError, match="nonsense"):
        build.build_library()
    assert not list(cache.glob("*.so"))


def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        build.build_library()


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be built"):
        build.build_library()


@needs_native
def test_the_library_brings_no_openmp_of_its_own() -> None:
    """A second runtime would mean a second pool of threads on the same cores."""
    path = build.find_library()
    assert path is not None
    assert b"libgomp.so" not in path.read_bytes()
    maps = Path("/proc/self/maps").read_text()
    of_torch = set(re.findall(r"(/\S*/torch\S*/lib[gi]?omp\S*)", maps))
    assert len(of_torch) == 1
