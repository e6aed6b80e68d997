"""Pythons that are too old for hooks, and come across their folder on the path."""

import ast
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "instrumentation" / "hooks" / "site"
VERSIONS = ("2.7", "3.6", "3.7", "3.8", "3.9", "3.10")
NEXT = "import sys\nsys.stdout.write('next %s\\n' % __name__)\nvalue = 7\n"
Run = Callable[..., subprocess.CompletedProcess[str]]


def interpreter(version: str) -> str:
    """A Python of that version, on the path or where pyenv has it; skips the test without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    code = "import sys; sys.stdout.write('%d.%d' % sys.version_info[:2])"
    for program in [*sorted(pyenv.glob(f"{version}.*/bin/python")), *([on_path] * bool(on_path))]:
        # pyenv has stand-ins on the path that do not run.
        done = subprocess.run([program, "-c", code], capture_output=True, text=True, timeout=60)
        if done.stdout == version:
            return str(program)
    pytest.skip(f"there is no Python {version}")


@pytest.fixture(params=VERSIONS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run some code with our folder on the path, and another `sitecustomize` behind it."""
    program = interpreter(request.param)
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "sitecustomize.py").write_text(NEXT)

    def call(code: str, *, gate: str = "", next_one: bool = True) -> subprocess.CompletedProcess:
        path = [str(SITE), *([str(tmp_path / "next")] if next_one else [])]
        return subprocess.run(
            [program, "-c", code],
            env={
                "PYTHONPATH": os.pathsep.join(path),
                "PYTHONDONTWRITEBYTECODE": "1",
                "ISINGLASS_HOOKS": gate,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    return call


def test_without_the_gate_nothing_is_said(run: Run) -> None:
    done = run("import sitecustomize; print(sitecustomize.value)")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "next sitecustomize\n7\n"
    alone = run("print(8)", next_one=False)
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "8\n", "")


def test_with_the_gate_one_line_says_what_is_needed(run: Run) -> None:
    # OpenTelemetry's `sitecustomize` calls it once more.
    code = "import _isinglass_hooks_boot as boot; boot.activate(); print(9)"
    done = run(code, gate="gc,vllm")
    assert (done.returncode, done.stdout) == (0, "next sitecustomize\n9\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("isinglass hooks: none is active: ")
    assert line.endswith("and hooks need 3.11 or newer")
    silent = run("print(9)", gate=" , ")
    assert silent.stderr == ""


@pytest.mark.parametrize("path", sorted(SITE.glob("*.py")), ids=lambda path: path.stem)
def test_what_old_pythons_read_has_only_what_they_know(path: Path) -> None:
    """Where none is at hand: the grammar of the oldest that can be asked for, in ASCII."""
    tree = ast.parse(path.read_bytes().decode("ascii"), feature_version=(3, 4))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.Nonlocal), node.lineno
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None, "say it in a comment"
            assert not node.args.kwonlyargs
            assert not any(argument.annotation for argument in node.args.args)
