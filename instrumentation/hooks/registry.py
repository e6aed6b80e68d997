"""The hooks there are: those built in, and those that other packages register by entry point.

Knows names, targets and where each hook's code lies. Does not import a hook's code before it is
needed. Standard library only: the loader runs in interpreters that have nothing else.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "isinglass.hooks"
"""Entry point group of users' hooks: functions of the imported module, with a `target`."""

GATE_VARIABLE = "ISINGLASS_HOOKS"
"""Environment variable that names the hooks to apply; without it there are none."""

AT_START = "sys"
"""Target of hooks that need no module: it is imported before anything else."""

Install = Callable[[ModuleType], object]


class Hook(NamedTuple):
    """A hook: what it is called, at whose import it is applied, and what it does."""

    name: str
    targets: tuple[str, ...]
    help: str
    source: str
    """`builtin`, or the entry point that it comes from."""
    load: Callable[[], Install]
    """Import its code; the result is called with each target, once it is imported."""
    tells_progress: bool = False
    """Whether it knows an engine's progress (`progress`), for the hook that looks for stalls."""


def _builtin(
    name: str, module: str, targets: tuple[str, ...], help: str, *, tells_progress: bool = False
) -> Hook:
    def load() -> Install:
        install: Install = import_module(f"instrumentation.hooks.{module}").install
        return install

    return Hook(name, targets, help, "builtin", load, tells_progress)


BUILTIN_HOOKS: dict[str, Hook] = {
    hook.name: hook
    for hook in (
        _builtin(
            "gc",
            "gc_events",
            (AT_START,),
            "journal an event for each garbage collection that takes long",
        ),
        _builtin(
            "nvtx-layers",
            "nvtx_layers",
            ("torch.nn",),
            "an NVTX range around the forward of every torch.nn.Module",
        ),
        _builtin(
            "py-spy-dump-on-stall",
            "py_spy_stall",
            (AT_START,),
            "dump all stacks when the main thread, or the engine's steps, make no progress",
        ),
        _builtin(
            "torch-profiler",
            "torch_profiler",
            (AT_START, "torch"),
            "profile for some seconds after a delay, or on a signal, into a Chrome trace",
        ),
        _builtin(
            "vllm",
            "vllm_engine",
            ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"),
            "journal the steps, phases and requests of a vLLM engine",
            tells_progress=True,
        ),
    )
}


def names_in(gate: str) -> list[str]:
    """The hooks that the gate's variable names, each once."""
    return list(dict.fromkeys(name.strip() for name in gate.split(",") if name.strip()))


def _entry_points() -> list["EntryPoint"]:
    """Those of users' hooks; a built-in hook's name is not for others to take."""
    from importlib.metadata import entry_points

    return [one for one in entry_points(group=GROUP) if one.name not in BUILTIN_HOOKS]


def _user_hook(entry_point: "EntryPoint") -> Hook:
    """Load a user's hook, because only its function knows its targets."""
    name, value = entry_point.name, entry_point.value
    source = f"entry point {value}"
    try:
        function = entry_point.load()
        target = getattr(function, "target", None)
        targets = (target,) if isinstance(target, str) else tuple(target or ())
        if not targets:
            raise AttributeError(
                f"{value} has no target; set its attribute `target` to the name of the module at "
                "whose import it is to be called"
            )
    except Exception as error:
        failure = error

        def fail() -> Install:
            raise failure

        return Hook(name, (), f"broken: {type(error).__name__}: {error}", source, fail)
    lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
    return Hook(name, targets, lines[0] if lines else "", source, lambda: function)


def hook_names() -> list[str]:
    """Names of all hooks that this interpreter knows, none of which is imported."""
    return sorted({*BUILTIN_HOOKS, *(one.name for one in _entry_points())})


def all_hooks() -> dict[str, Hook]:
    """Every hook that this interpreter knows, by name; one that cannot be loaded has no targets."""
    return BUILTIN_HOOKS | {one.name: _user_hook(one) for one in _entry_points()}


def find_hook(name: str) -> Hook | None:
    """The hook of that name, None where there is none; imports no other."""
    if name in BUILTIN_HOOKS:
        return BUILTIN_HOOKS[name]
    found = [one for one in _entry_points() if one.name == name]
    return _user_hook(found[0]) if found else None
