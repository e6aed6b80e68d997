"""The public names: all of them resolve, and the caller's path stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

import engine
import engine.errors
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def in_fresh_interpreter(code: str) -> str:
    """What the code prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", engine.__all__)
def test_each_public_name_resolves_to_what_it_says(name: str) -> None:
    value = getattr(engine, name)
    assert value.__name__ == name
    # A second look finds it without another import.
    assert vars(engine)[name] is value


def test_the_list_of_public_names_is_complete() -> None:
    errors = {
        name
        for name, value in vars(engine.errors).items()
        if isinstance(value, type) and issubclass(value, engine.errors.IsinglassError)
    }
    assert set(engine.__all__) == errors | set(engine._HOME)
    assert len(set(engine.__all__)) == len(engine.__all__)
    assert set(engine.__all__) <= set(dir(engine))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'engine' has no attribute 'Nonsense'"):
        _ = engine.Nonsense
    with pytest.raises(ImportError):
        from engine import AlsoNonsense  # noqa: F401


def test_each_public_thing_says_what_it_is() -> None:
    for name in engine.__all__:
        assert getattr(engine, name).__doc__, name


def test_errors_are_one_tree_and_bad_input_is_a_value_error() -> None:
    for name in ("ConfigError", "PromptError", "SamplingParamsError", "RequestError"):
        assert issubclass(getattr(engine, name), ValueError)
    assert issubclass(engine.PromptError, engine.RequestError)
    dead = engine.EngineDeadError("dead", exit_code=-9, log_tail=("last words",))
    assert (dead.exit_code, dead.log_tail, str(dead)) == (-9, ("last words",), "dead")


def test_the_callers_path_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, engine\n"
        "before = set(sys.modules)\n"
        "from engine import LLM, LLMEngine, SamplingParams, RequestOutput, EngineConfig, Logprob\n"
        "import engine.cli.main\n"
        "import engine.transport.mp_client\n"
        "SamplingParams(temperature=0.5).clone(n=2)\n"
        "EngineConfig.from_kwargs(max_num_seqs=2)\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'scipy', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert in_fresh_interpreter(code) == "[]"


def test_importing_the_package_alone_imports_nothing_else() -> None:
    code = (
        "import sys, engine\n"
        "print(sorted(m for m in sys.modules if m.startswith(('engine', 'instrumentation'))))\n"
    )
    assert in_fresh_interpreter(code) == "['engine', 'engine.errors', 'engine.version']"


def test_the_version_is_a_plain_release_number() -> None:
    assert all(part.isdigit() for part in engine.__version__.split("."))
    assert len(engine.__version__.split(".")) == 3
