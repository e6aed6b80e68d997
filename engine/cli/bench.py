"""`isinglass bench serve`: its flags, and what they make.

Knows arguments. Does not know how a load is sent or measured; the modules that do are imported
when the command runs, so that other commands do not pay for them.
"""

import argparse
import os
from typing import TYPE_CHECKING, Any

from engine.bench.definitions import METRICS
from engine.bench.flags import serve_parser
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.bench.measure import Objective
    from engine.bench.prompts import PromptSource
    from engine.bench.settings import LoadSettings


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Mount `bench` and its one command, `serve`."""
    bench = commands.add_parser(
        "bench", help="measure a running server", description="Measure a running server."
    )
    kinds = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve_parser(kinds).set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Send the load and report; returns the exit code."""
    from engine.bench import command

    metrics = _names(arguments.percentile_metrics)
    percents = _percents(arguments.metric_percentiles)
    if arguments.save_detailed and arguments.save is None:
        raise ConfigError("--save-detailed needs --save FILE")
    _check_files(arguments)
    return command.run(
        _settings(arguments),
        _prompts(arguments),
        metrics=metrics,
        percents=percents,
        objective=_objective(arguments),
        save=arguments.save,
        save_detailed=arguments.save_detailed,
        plot=arguments.plot,
        show_progress=not arguments.disable_tqdm,
    )


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse, before the run, what could not be written after it."""
    for flag, path in (("--save", arguments.save), ("--plot", arguments.plot)):
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"{flag} takes a file, and {path} is a folder")
        parent = path.absolute().parent
        if not parent.is_dir():
            raise ConfigError(f"{parent} is no folder; make it before the run")
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise ConfigError(f"{flag}: no permission to write {path}")
    save, plot = arguments.save, arguments.plot
    if save is not None and plot is not None and save.resolve() == plot.resolve():
        raise ConfigError("--save and --plot name the same file")


def _settings(arguments: argparse.Namespace) -> "LoadSettings":
    from engine.bench.settings import LoadSettings

    num_prompts = arguments.num_prompts
    if num_prompts is None and arguments.duration is None:
        num_prompts = 1000
    return LoadSettings(
        base_url=arguments.base_url,
        endpoint=arguments.endpoint,
        model=arguments.model,
        num_prompts=num_prompts,
        duration_s=arguments.duration,
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        num_warmups=arguments.num_warmups,
        seed=arguments.seed,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        extra_body=arguments.extra_body,
        headers=_headers(arguments.header),
        api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY") or None,
        request_id_prefix=arguments.request_id_prefix,
        timeout_s=arguments.timeout,
        ready_timeout_s=arguments.ready_timeout,
        insecure=arguments.insecure,
    )


def _prompts(arguments: argparse.Namespace) -> "PromptSource":
    from engine.bench.prompts import FixedPrompts, RandomPrompts, SharedPrefixPrompts, read_prompts

    name = arguments.dataset_name or ("custom" if arguments.dataset_path else "random")
    _check_prompt_flags(arguments, name)
    input_len = _or(arguments.input_len, 128)
    output_len = arguments.output_len
    range_ratio = _or(arguments.range_ratio, 0.0)
    if name == "custom":
        return read_prompts(arguments.dataset_path, output_len=output_len)
    words = RandomPrompts(
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        seed=arguments.seed,
        token_id_range=_token_ids(arguments.token_ids),
    )
    if name == "random":
        return words
    if name == "fixed":
        text = arguments.prompt or words.prompt(0).text
        assert text is not None
        return FixedPrompts(text=text, output_len=output_len)
    return SharedPrefixPrompts(
        num_prefixes=_or(arguments.num_prefixes, 8),
        prefix_len=_or(arguments.prefix_len, 256),
        suffix_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        seed=arguments.seed,
        chat=arguments.endpoint == "chat",
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_prompt_flags(arguments: argparse.Namespace, name: str) -> None:
    """Refuse what would be ignored, and numbers out of range."""
    if (name == "custom") != (arguments.dataset_path is not None):
        raise ConfigError("--dataset-path and --dataset-name custom go together")
    shared = ("shared-prefix", "prefix_repetition")
    uses = {
        "prompt": ("fixed",),
        "token_ids": ("random",),
        "input_len": ("random", *shared, *(() if arguments.prompt else ("fixed",))),
        "range_ratio": ("random", *shared),
        "num_prefixes": shared,
        "prefix_len": shared,
    }
    for flag, names in uses.items():
        if getattr(arguments, flag) is not None and name not in names:
            raise ConfigError(
                f"--{flag.replace('_', '-')} means nothing here; it goes with --dataset-name "
                f"{' or '.join(names)}"
            )
    for flag in ("input_len", "output_len", "num_prefixes", "prefix_len"):
        if _or(getattr(arguments, flag), 1) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1")
    if not 0 <= _or(arguments.range_ratio, 0.0) <= 1:
        raise ConfigError(f"--range-ratio must be from 0 to 1, not {arguments.range_ratio:g}")


def _objective(arguments: argparse.Namespace) -> "Objective | None":
    from engine.bench.measure import Objective

    limits: dict[str, float] = {}
    for text in arguments.goodput:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limit > 0 or name in limits:
            raise ConfigError(
                f"--goodput takes ttft:MS, tpot:MS and e2el:MS, each once; not {text!r}"
            )
        limits[name] = limit
    flags = {
        "ttft": arguments.slo_ttft_ms,
        "tpot": arguments.slo_tpot_ms,
        "e2el": arguments.slo_e2e_ms,
    }
    for name, value in flags.items():
        if value is None:
            continue
        if name in limits or not value > 0:
            raise ConfigError(f"the limit of {name} must be given once, and be more than 0")
        limits[name] = value
    if not limits:
        return None
    return Objective(**{f"{name}_ms": limit for name, limit in limits.items()})


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(METRICS):
        raise ConfigError(f"--percentile-metrics takes {', '.join(METRICS)}; not {text!r}")
    return names


def _percents(text: str) -> tuple[float, ...]:
    try:
        percents = tuple(float(part) for part in text.split(","))
    except ValueError:
        percents = (-1.0,)
    if not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100; not {text!r}")
    return percents


def _headers(texts: list[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"--header takes NAME=VALUE, not {text!r}")
        if name in headers:
            raise ConfigError(f"--header names {name} twice")
        headers[name] = value
    return headers


def _token_ids(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        low, high = map(int, text.split(":"))
    except ValueError:
        low = high = -1
    if not 0 <= low < high:
        raise ConfigError(f"--token-ids takes LOW:HIGH with 0 <= LOW < HIGH, not {text!r}")
    return low, high
