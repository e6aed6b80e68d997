"""The wheel: all that lies in its packages is in it, and it runs without the repository."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from engine.version import __version__
from tests.support.documentation import PYTHON_BLOCKS
from tests.support.scripts import ROOT
from tests.waiting import PATIENCE_S

PACKAGES = ("engine", "instrumentation", "traces")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it would be released."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and of this one everything but the repository."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True, timeout=PATIENCE_S)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder that is named so is searched, but its own .pth files, of which one leads to the
    # repository, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(environment: Path, command: list[str], cwd: Path, *, text: str = "") -> str:
    """What a command of the environment prints, somewhere else than in the repository."""
    done = subprocess.run(
        [str(environment / "bin" / command[0]), *command[1:]],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_all_that_lies_in_the_packages_is_in_the_wheel(wheel: Path) -> None:
    """Sources of the native kernels, the live page, the hooks' site folder, marks of types."""
    there = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for pattern in (*(f"{name}/py.typed" for name in PACKAGES), "*.cpp", "*.html", "*/METADATA"):
        assert any(Path(name).match(pattern) for name in there), pattern
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if not name.partition("/")[0].endswith(".dist-info")} == there


def test_the_first_example_runs_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    look = f"import {', '.join(PACKAGES)}\n"
    look += "".join(f"print({name}.__file__)\n" for name in PACKAGES)
    out = run(environment, ["python", "-"], tmp_path, text=look + PYTHON_BLOCKS[0])
    *places, said = out.split("\n", len(PACKAGES))
    assert all(place.startswith(str(environment)) for place in places), places
    assert said.strip()


def test_the_command_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    assert __version__ in run(environment, ["isinglass", "--version"], tmp_path)
    assert "--api-server-count" in run(environment, ["isinglass", "serve", "--help"], tmp_path)
