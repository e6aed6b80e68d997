"""The import contract: layers of the engine point downwards, instrumentation stands apart."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    ("cli",),
    ("bench", "server/process"),
    ("server/app",),
    ("server/admin", "server/live", "server/openai"),
    ("server/state",),
    ("server/cluster", "server/openai/tools"),
    ("server/http", "server/openai/protocol", "server/openai/reasoning"),
    ("server/config",),
    ("api",),
    ("frontend",),
    ("transport",),
    ("core",),
    ("structured",),
    ("executor",),
    ("worker",),
    ("models",),
    ("layers",),
    ("attention",),
    ("native",),
    ("text",),
    ("resolve",),
    ("checkpoint", "config", "interpreter", "types"),
    ("structured/forms",),
    ("types/sampling_checks",),
    ("log",),
    ("errors", "version"),
)
"""Rooms of the engine and files beside them, from the top down: each imports what is below it."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
INSTRUMENTATION_LAYERS = (
    ("audit", "testing"),
    ("hooks",),
    ("__init__",),
    ("otel", "setup"),
    ("metrics", "profile"),
    ("explain",),
    ("record",),
    ("config", "labels", "names", "trace_context"),
)
INSTRUMENTATION_RANK = {
    name: rank for rank, names in enumerate(INSTRUMENTATION_LAYERS) for name in names
}
ENTRY_POINT_MODULES = {
    "instrumentation.setup",
    "instrumentation.audit",
    "instrumentation.metrics.frontend",
    "instrumentation.explain.console",
    "instrumentation.metrics.types",
    "instrumentation.metrics.requests",
    "instrumentation.metrics.buckets",
    "instrumentation.metrics.prometheus",
    "instrumentation.metrics.vllm_names",
    "instrumentation.otel.setup",
    "instrumentation.otel.telemetry",
    "instrumentation.otel.attributes",
    "instrumentation.otel.request_spans",
    "instrumentation.otel.http_spans",
    "instrumentation.metrics.server",
    "instrumentation.metrics.engine",
    "instrumentation.metrics.info",
    "instrumentation.metrics.merge",
    "instrumentation.names",
    "instrumentation.record.journal",
    "instrumentation.otel.startup_spans",
    "instrumentation.hooks.folder",
    "instrumentation.hooks.registry",
}
"""What may be imported of instrumentation besides its root, and by whom."""
ENTRY_POINTS = ("api/", "cli/", "config.py", "frontend/observer.py", "transport/inproc_client.py")
ENTRY_POINTS += ("frontend/request_tracer.py", "frontend/opentelemetry_tracer.py")
ENTRY_POINTS += ("core/engine_core_proc.py", "server/")
# The client that runs the core in the caller's process stands for the process boundary.
MODEL_LIBRARIES = {"torch", "transformers"}
CALLER_LAYERS = {
    "cli",
    "server",
    "bench",
    "api",
    "text",
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


def layer_of(path: Path, ranks: dict[str, int] = RANK, package: str = "engine") -> str:
    """Which layer of a package a file belongs to: the innermost of its folders that has one.

    Raises:
        KeyError: none is named for it.
    """
    parts = path.relative_to(ROOT / package).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    for length in range(len(parts), 0, -1):
        if "/".join(parts[:length]) in ranks:
            return "/".join(parts[:length])
    raise KeyError(f"no layer is named for {path.relative_to(ROOT)}")


def file_of(module: str) -> Path | None:
    """The source file of a module of ours."""
    path = ROOT / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


ENGINE_FILES = [path for path in files_of("engine") if path != ROOT / "engine" / "__init__.py"]


# `engine/server/__init__.py` and the like hold a docstring only, and stand above their rooms.
ENGINE_FILES = [path for path in ENGINE_FILES if path.read_text().count("\n") > 1]


def test_every_file_of_the_engine_belongs_to_a_layer() -> None:
    assert len(ENGINE_FILES) > 50
    # Each layer exists: a renamed folder must not slip out of the contract.
    assert set(RANK) == {layer_of(path) for path in ENGINE_FILES}


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
                layer == "cli" and not one.at_import_time
            ):
                wrong.append(str(one))
            if parts[0] != "engine":
                continue
            target = file_of(one.module)
            assert target is not None, one
            if target == ROOT / "engine" / "__init__.py":
                if layer not in ("cli", "api"):  # the package root is the public API
                    wrong.append(str(one))
            elif (other := layer_of(target)) != layer and RANK[other] <= RANK[layer]:
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
        if layer_of(path).split("/")[0] in CALLER_LAYERS
        for one in imports_of(path)
        if one.at_import_time and one.module.split(".")[0] in MODEL_LIBRARIES
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_of_instrumentation_point_downwards() -> None:
    ranks, package = INSTRUMENTATION_RANK, "instrumentation"
    wrong, seen = [], set()
    for path in files_of(package):
        if path.read_text().count("\n") <= 1:
            continue
        layer = layer_of(path, ranks, package)
        seen.add(layer)
        for one in imports_of(path):
            target = file_of(one.module)
            if target is None or not one.module.startswith(package):
                continue
            other = layer_of(target, ranks, package)
            if other != layer and ranks[other] <= ranks[layer]:
                wrong.append(str(one))
    assert seen == set(ranks)
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports within functions and those for types alone count too."""
    graph = {
        path: {
            target
            for one in imports_of(path)
            if (target := file_of(one.module)) is not None and target != path
        }
        for package in ("engine", "instrumentation", "traces")
        for path in files_of(package)
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


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
    assert importers <= {"engine/cli/main.py"}


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


def test_no_test_module_imports_another() -> None:
    """What several share is in `tests.support`."""
    wrong = [
        str(one)
        for path in files_of("tests")
        for one in imports_of(path)
        if one.module.startswith("tests.") and one.module.split(".")[-1].startswith("test_")
    ]
    assert not wrong, "\n".join(wrong)
