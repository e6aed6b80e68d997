"""Which kernels run a model: what settings ask for, what models allow, what machines have."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.kernels import select_kernels
from engine.native import library
from tests.support.native_support import needs_native
from tests.tiny_models import build_tiny_checkpoint

CPU = torch.device("cpu")


def select(folder: Path, **changes: Any) -> str:
    """The name of the chosen backend for a tiny model that the native kernels can run."""
    settings = {k: v for k, v in changes.items() if k in ("attention_backend", "cpu_kernels")}
    rest = {k: v for k, v in changes.items() if k not in settings}
    arguments = {
        "dtype": torch.bfloat16,
        "device": CPU,
        "block_size": 16,
        "is_gguf": False,
        "has_module_hooks": False,
    }
    config = read_model_config(resolve_model(str(folder)))
    model = EngineConfig.from_kwargs(**settings).model
    return select_kernels(model, config, **(arguments | rest)).name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_tiny_checkpoint(tmp_path, "llama", hidden_size=128, head_dim=32)


@needs_native
def test_the_native_kernels_are_the_default(folder: Path) -> None:
    assert select(folder) == "native"
    assert select(folder, cpu_kernels="native") == "native"
    assert select(folder, attention_backend="native") == "native"


def test_pytorch_on_request(folder: Path) -> None:
    assert select(folder, cpu_kernels="torch") == "cpu"
    assert select(folder, attention_backend="cpu") == "cpu"
    assert select(folder, attention_backend="torch_reference") == "torch_reference"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "float32 is not bfloat16"),
        ({"block_size": 8}, "block_size 8"),
        ({"has_module_hooks": True}, "enable_layerwise_nvtx_tracing"),
    ],
)
def test_one_line_says_why_not(
    folder: Path, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert select(folder, **changes) == "cpu"
    [line] = [record.getMessage() for record in caplog.records if "kernels" in record.name]
    assert reason in line
    with pytest.raises(ConfigError, match=reason):
        select(folder, cpu_kernels="native", **changes)


def test_a_model_of_transformers_runs_in_pytorch(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path, "gpt_neox")
    assert select(folder) == "cpu"
    with pytest.raises(ConfigError, match="Transformers"):
        select(folder, cpu_kernels="native")


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "cpu", "cpu_kernels": "native"},
        {"attention_backend": "native", "cpu_kernels": "torch"},
    ],
)
def test_settings_that_exclude_each_other(folder: Path, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        select(folder, **settings)


def test_without_library_and_compiler_pytorch_runs_the_model(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "missing_feature", lambda: None)
    library.load_library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert select(folder) == "cpu"
        assert "no C++ compiler" in caplog.text
        with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
            select(folder, cpu_kernels="native")
    finally:
        library.load_library.cache_clear()


def test_a_processor_without_the_matrix_unit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "missing_feature", lambda: "the processor lacks amx_bf16")
    library.load_library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert select(folder) == "cpu"
        assert "lacks amx_bf16" in caplog.text
    finally:
        library.load_library.cache_clear()
