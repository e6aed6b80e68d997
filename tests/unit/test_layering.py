"""The import contract: layers of the engine point downwards, instrumentation stands apart."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    ("server", "bench"),
    ("api",),
    ("frontend",),
    ("transport",),
    ("core",),
    ("executor",),
    ("worker",),
    ("models",),
    ("layers",),
    ("attention",),
    ("native",),
    ("checkpoint", "structured", "types", "config", "resolve", "errors", "log", "version"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
ENTRY_POINT_MODULES = {
    "instrumentation.setup",
    "instrumentation.audit",
    "instrumentation.metrics",
    "instrumentation.console",
    "instrumentation.metric_types",
    "instrumentation.request_metrics",
    "instrumentation.histogram_buckets",
    "instrumentation.prometheus",
    "instrumentation.vllm_names",
    "instrumentation.otel.setup",
    "instrumentation.otel.telemetry",
    "instrumentation.otel.attributes",
    "instrumentation.otel.request_spans",
    "instrumentation.otel.http_spans",
    "instrumentation.server_metrics",
    "instrumentation.engine_metrics",
    "instrumentation.metric_info",
    "instrumentation.metric_merge",
    "instrumentation.names",
    "instrumentation.journal",
    "instrumentation.otel.startup_spans",
    "instrumentation.hooks.folder",
    "instrumentation.hooks.registry",
}
"""What may be imported of instrumentation besides its root, and by whom."""
ENTRY_POINTS = ("api/", "config.py", "frontend/observer.py", "transport/inproc_client.py")
ENTRY_POINTS += ("frontend/request_tracer.py", "frontend/opentelemetry_tracer.py")
ENTRY_POINTS += ("core/engine_core_proc.py", "server/")
# The client that runs the core in the caller's process stands for the process boundary.
MODEL_LIBRARIES = {"torch", "transformers"}
CALLER_LAYERS = {
    "server",
    "bench",
    "api",
    "frontend",
    "transport",
    "checkpoint",
    "structured",
    "types",
    "config",
    "resolve",
}


class Import(NamedTuple):
    """One import statement."""

    path: Path
    line: int
    module: str
    at_import_time: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of a file, those within functions too."""

    def visit(node: ast.AST, *, at_import_time: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(path, child.lineno, alias.name, at_import_time)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: a relative import"
                module = child.module or ""
                for alias in child.names:
                    submodule = ROOT / module.replace(".", "/") / f"{alias.name}.py"
                    name = f"{module}.{alias.name}" if submodule.is_file() else module
                    yield Import(path, child.lineno, name, at_import_time)
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, at_import_time=at_import_time and not inner)

    return visit(ast.parse(path.read_text()), at_import_time=True)


def files_of(package: str) -> list[Path]:
    """Source files below a top-level folder."""
    return sorted((ROOT / package).rglob("*.py"))


def layer_of(path: Path) -> str:
    """Which layer of the engine a file belongs to."""
    first = path.relative_to(ROOT / "engine").parts[0]
    return first.removesuffix(".py")


ENGINE_FILES = [path for path in files_of("engine") if path != ROOT / "engine" / "__init__.py"]


def test_every_file_of_the_engine_belongs_to_a_layer() -> None:
    assert len(ENGINE_FILES) > 50
    unknown = {layer_of(path) for path in ENGINE_FILES} - set(RANK)
    assert not unknown, f"no layer is named for {sorted(unknown)}"
    # Each layer exists: a renamed folder must not slip out of the contract.
    assert set(RANK) == {layer_of(path) for path in ENGINE_FILES}


def is_command_of(path: Path, one: Import) -> bool:
    """Whether the command line mounts a command that lives above it."""
    is_command = one.module.split(".")[-1] == "cli"
    return path == ROOT / "engine/api/cli.py" and is_command and not one.at_import_time


def is_tokenizer_of_grammars(path: Path, one: Import) -> bool:
    """Whether structured outputs learn, when the first one comes, which text each token adds."""
    is_tokenizer = one.module == "engine.frontend.tokenizer" and not one.at_import_time
    return path == ROOT / "engine/structured/vocabulary.py" and is_tokenizer


@pytest.mark.parametrize("layer", sorted(RANK))
def test_imports_point_downwards(layer: str) -> None:
    wrong = []
    for path in ENGINE_FILES:
        if layer_of(path) != layer:
            continue
        for one in imports_of(path):
            parts = one.module.split(".")
            # The command line may read recorded runs and dashboards, lazily.
            if parts[0] in ("traces", "dashboards") and not (
                layer == "api" and not one.at_import_time
            ):
                wrong.append(str(one))
            if parts[0] != "engine":
                continue
            target = parts[1] if len(parts) > 1 else None
            if target is None:
                if layer != "api":  # the package root is the public API
                    wrong.append(str(one))
            elif RANK[target] < RANK[layer] and not (
                is_command_of(path, one) or is_tokenizer_of_grammars(path, one)
            ):
                wrong.append(str(one))
    assert not wrong, "\n".join(wrong)


def test_the_public_root_imports_next_to_nothing() -> None:
    modules = {
        one.module for one in imports_of(ROOT / "engine" / "__init__.py") if one.at_import_time
    }
    assert {m for m in modules if m.startswith("engine")} == {
        "engine.errors",
        "engine.version",
    }


def test_the_callers_layers_import_no_model_library_when_they_are_imported() -> None:
    wrong = [
        str(one)
        for path in ENGINE_FILES
        if layer_of(path) in CALLER_LAYERS
        for one in imports_of(path)
        if one.at_import_time and one.module.split(".")[0] in MODEL_LIBRARIES
    ]
    assert not wrong, "\n".join(wrong)


def test_instrumentation_imports_nothing_of_the_engine() -> None:
    files = files_of("instrumentation")
    assert len(files) > 10
    wrong = [
        str(one)
        for path in files
        for one in imports_of(path)
        if one.module.split(".")[0] in ("engine", "traces", "dashboards")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_sees_only_the_root_of_instrumentation() -> None:
    wrong = []
    for path in ENGINE_FILES:
        place = path.relative_to(ROOT / "engine").as_posix()
        is_entry_point = place.startswith(ENTRY_POINTS)
        for one in imports_of(path):
            if not one.module.startswith("instrumentation."):
                continue
            if not (is_entry_point and one.module in ENTRY_POINT_MODULES):
                wrong.append(str(one))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["traces", "dashboards"])
def test_nothing_but_the_command_line_imports_readers_of_runs(package: str) -> None:
    importers = {
        one.path.relative_to(ROOT).as_posix()
        for other in ("engine", "instrumentation", "traces", "dashboards")
        if other != package
        for path in files_of(other)
        for one in imports_of(path)
        if one.module.split(".")[0] == package
    }
    assert importers <= {"engine/api/cli.py"}


def test_the_parser_sees_imports_wherever_they_are(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "import a.b\nfrom engine.types import codec\nif True:\n    from c import d\n"
        "def f():\n    import e\n    class G:\n        from h import i\n"
    )
    seen = {(one.module, one.at_import_time) for one in imports_of(source)}
    assert seen == {
        ("a.b", True),
        ("engine.types.codec", True),
        ("c", True),
        ("e", False),
        ("h", False),
    }
