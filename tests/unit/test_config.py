"""Settings: each has help, is checked for type and range, and crosses to the core unchanged."""

import json
import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from engine.config import GROUPS, EngineConfig, default_of
from engine.errors import ConfigError
from engine.resolve import resolve_limits
from tests.support.model_configs import model_config

SPECS = [(spec.name, spec) for group in GROUPS.values() for spec in fields(group)]
NUMERIC = [
    (name, spec)
    for name, spec in SPECS
    if any(kind in str(spec.type) for kind in ("int", "float")) and "tuple" not in str(spec.type)
]


@pytest.mark.parametrize(("name", "spec"), SPECS, ids=[name for name, _ in SPECS])
def test_every_setting_says_what_it_does(name: str, spec: Any) -> None:
    text = spec.metadata["help"]
    assert len(text) > 15
    assert text[-1] in ".)"
    assert text[0].isupper() or text.startswith(("auto", "fcfs"))


def test_names_are_unique_over_all_groups() -> None:
    names = [name for name, _ in SPECS]
    assert len(set(names)) == len(names)


def test_defaults_are_valid_and_can_be_asked_for() -> None:
    config = EngineConfig.from_kwargs()
    for name, group in GROUPS.items():
        for spec in fields(group):
            assert (
                getattr(getattr(config, name), spec.name) == default_of(spec.name) == spec.default
            )
    with pytest.raises(ConfigError, match="unknown engine argument 'nonsense'"):
        default_of("nonsense")


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq'.*Did you mean 'max_num_seqs'"):
        EngineConfig.from_kwargs(max_num_seq=4)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(qqqqq=4)
    assert "Did you mean" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "spec"), SPECS, ids=[name for name, _ in SPECS])
def test_wrong_types_are_refused(name: str, spec: Any) -> None:
    kind = str(spec.type)
    wrong: list[Any] = [{}, object(), b"x"]
    if "bool" in kind:
        wrong += [1, 0, "true", 1.0]
    elif "float" in kind or "int" in kind:
        wrong += [True, "1"]
    else:
        wrong += [True, 1, 1.5]
    if "float" not in kind:
        wrong.append(1.5)
    if "None" not in kind:
        wrong.append(None)
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^{name} must"):
            EngineConfig.from_kwargs(**{name: value})


@pytest.mark.parametrize(("name", "spec"), NUMERIC, ids=[name for name, _ in NUMERIC])
def test_ranges_are_closed_and_kept(name: str, spec: Any) -> None:
    low, high = spec.metadata["minimum"], spec.metadata["maximum"]
    assert low is not None, "a number without a lower bound"
    step = 0.0001 if "float" in str(spec.type) else 1
    EngineConfig.from_kwargs(**{name: low})
    with pytest.raises(ConfigError, match=f"^{name} must be at least"):
        EngineConfig.from_kwargs(**{name: low - step})
    if high is not None:
        EngineConfig.from_kwargs(**{name: high})
        with pytest.raises(ConfigError, match=f"^{name} must be at most"):
            EngineConfig.from_kwargs(**{name: high + step})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name, spec in NUMERIC if "float" in str(spec.type)])
def test_numbers_must_be_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a finite number"):
        EngineConfig.from_kwargs(**{name: value})


@pytest.mark.parametrize(
    "name", [name for name, spec in SPECS if spec.metadata["choices"] is not None]
)
def test_choices_are_listed_in_the_error(name: str) -> None:
    choices = dict(SPECS)[name].metadata["choices"]
    for choice in choices:
        EngineConfig.from_kwargs(**{name: choice})
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{name: "nonsense"})
    assert all(choice in str(caught.value) for choice in choices)


def test_an_int_is_good_enough_for_a_float() -> None:
    config = EngineConfig.from_kwargs(engine_shutdown_timeout_s=3)
    assert config.process.engine_shutdown_timeout_s == 3


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="could never be scheduled"):
        EngineConfig.from_kwargs(
            enable_chunked_prefill=False, max_model_len=100, max_num_batched_tokens=99
        )
    EngineConfig.from_kwargs(
        enable_chunked_prefill=False, max_model_len=100, max_num_batched_tokens=100
    )


def test_the_way_to_another_process_and_back() -> None:
    config = EngineConfig.from_kwargs(
        model="m", max_num_seqs=3, gpu_memory_utilization=0.5, logits_processors=["a:B"]
    )
    wire = json.loads(json.dumps(config.to_dict()))
    assert EngineConfig.from_dict(wire) == config
    assert config.model.logits_processors == ("a:B",)


def test_settings_cannot_be_assigned_to() -> None:
    config = EngineConfig.from_kwargs()
    with pytest.raises(FrozenInstanceError):
        config.scheduler.max_num_seqs = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (1_000, 2_048)),
        ({"max_model_len": 100}, (100, 2_048)),
        ({"max_num_batched_tokens": 7}, (1_000, 7)),
        ({"enable_chunked_prefill": False}, (1_000, 2_048)),
        ({"enable_chunked_prefill": False, "max_model_len": 30}, (30, 2_048)),
    ],
)
def test_limits_from_settings_and_model(
    settings: dict[str, Any], expected: tuple[int, int]
) -> None:
    limits = resolve_limits(EngineConfig.from_kwargs(**settings), model_config())
    assert (limits.max_model_len, limits.max_num_batched_tokens) == expected


def test_without_chunks_the_budget_grows_with_the_context() -> None:
    config = EngineConfig.from_kwargs(enable_chunked_prefill=False)
    limits = resolve_limits(config, model_config(max_position_embeddings=9_000))
    assert limits.max_num_batched_tokens == 9_000


def test_limits_that_the_model_cannot_honour() -> None:
    with pytest.raises(ConfigError, match="exceeds the model's context of 1000"):
        resolve_limits(EngineConfig.from_kwargs(max_model_len=1_001), model_config())
    config = EngineConfig.from_kwargs(enable_chunked_prefill=False, max_num_batched_tokens=999)
    with pytest.raises(ConfigError, match="could never be scheduled"):
        resolve_limits(config, model_config())
