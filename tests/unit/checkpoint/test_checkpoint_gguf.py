"""GGUF files: our reader and decoders against the gguf package, and whole models from a file."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.attention.registry import select_backend
from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.gguf import GGML_TYPES, GGUFFile
from engine.checkpoint.locate import resolve_model
from engine.errors import CheckpointError, UnsupportedModelError
from engine.models.gguf_weights import dequantize
from engine.models.weights import iterate_weights
from tests.support.paged_runs import CPU, LENGTHS, STEPS, load, make_prompts, run_in_steps
from tests.tiny_models import VOCAB_SIZE, build_tiny_model

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write_gguf(
    path: Path,
    model: Any,
    *,
    extra_tensors: dict[str, np.ndarray] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Write a Transformers model as llama.cpp's converter does: its names, its order of rows."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_token_list([f"t{index}é" for index in range(VOCAB_SIZE)])
    writer.add_array("test.numbers", [1, -2, 3])
    for key, value in (settings or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if arch == "llama" and part in name:
                split = values.reshape(count, 2, -1, *values.shape[1:])
                values = split.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), values.copy())
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("family", "overrides", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("llama", {"attention_bias": True}, {}),
        ("llama", {}, {"llama.attention.sliding_window": 8}),  # not a fact of this architecture
        ("qwen2", {}, {}),
        ("qwen3", {}, {}),
    ],
)
def test_a_model_from_gguf_equals_transformers(
    family: str, overrides: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = build_tiny_model(family, **overrides)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, settings=settings)
    config = read_model_config(resolve_model(str(path)))
    assert config.dtype == "float32"
    assert config.vocab_size == VOCAB_SIZE
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2, 5)
    assert config.tie_word_embeddings == bool(overrides.get("tie_word_embeddings"))
    backend = select_backend("cpu", CPU)
    prompts = make_prompts(LENGTHS)
    results = run_in_steps(load(path, backend), backend, prompts, STEPS)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_rope_divisors_and_scaling_from_gguf(tmp_path: Path) -> None:
    """Llama 3.1 files carry their rope rule as a tensor; others as keys."""
    rule = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    }
    model = build_tiny_model("llama", rope_parameters=rule)
    plain = 1.0 / 500.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 7
    assert divisors.min() == 1
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, extra_tensors={"rope_freqs.weight": divisors})
    backend = select_backend("cpu", CPU)
    prompts = make_prompts((40,))
    result = run_in_steps(load(path, backend), backend, prompts, [[40]])[0]
    with torch.inference_mode():
        expected = model(torch.tensor(prompts)).logits[0]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)

    settings = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    write_gguf(path, build_tiny_model("llama"), settings=settings)
    scaling = read_model_config(resolve_model(str(path))).rope_scaling
    expected_scaling = {"rope_type": "yarn", "factor": 4.0}
    assert scaling == expected_scaling | {"original_max_position_embeddings": 64}


def test_embedded_model_as_the_gguf_package_reads_it() -> None:
    """Metadata of every kind, and one tensor of each type and role, un-permuted where due."""
    source = resolve_model(None)
    file, config = GGUFFile(source.path), read_model_config(source)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == config.vocab_size == 49152
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.intermediate_size) == (576, 64, 1536)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.max_position_embeddings == 8192
    assert config.rope_theta == 100000.0
    assert config.dtype == "bfloat16"
    wanted = {
        "model.norm.weight": "output_norm.weight",
        "model.layers.3.self_attn.q_proj.weight": "blk.3.attn_q.weight",
        "model.layers.3.self_attn.k_proj.weight": "blk.3.attn_k.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.embed_tokens.weight": "token_embd.weight",
    }
    weights = {name: weight for name, weight in iterate_weights(source, config) if name in wanted}
    for name, gguf_name in wanted.items():
        tensor = file.tensors[gguf_name]
        rows = np.frombuffer(file.data(gguf_name), np.uint8).reshape(tensor.shape[0], -1)
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        expected = gguf.dequantize(rows, kind).reshape(tensor.shape)
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:  # pairs of neighbours back to halves, written out row by row
                order = [
                    head * 64 + 2 * pair + half
                    for head in range(heads)
                    for half in range(2)
                    for pair in range(32)
                ]
                expected = expected[order]
        np.testing.assert_array_equal(weights[name].numpy(), expected)


def test_type_table_equals_the_gguf_package() -> None:
    for type_id, kind in GGML_TYPES.items():
        known = gguf.GGMLQuantizationType(type_id)
        assert kind == (known.name, *gguf.GGML_QUANT_SIZES[known])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_decoders_equal_the_gguf_package(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(48, 96)).astype(np.float32)
    encoded = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    check_decoded(encoded, kind, tmp_path)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_rare_types_go_through_the_gguf_package(kind: str, tmp_path: Path) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    encoded = np.random.default_rng(2).integers(0, 60, (6, block_bytes), dtype=np.uint8)
    check_decoded(encoded, kind, tmp_path)


def check_decoded(encoded: np.ndarray, kind: str, folder: Path) -> None:
    known = gguf.GGMLQuantizationType[kind]
    path = folder / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weight", encoded, raw_dtype=known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    result = dequantize(file, file.tensors["weight"]).float().numpy()
    np.testing.assert_array_equal(result, gguf.dequantize(encoded, known))
    assert np.abs(result).max() > 0


def test_a_type_that_nobody_decodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weight", np.arange(32, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    with pytest.raises(UnsupportedModelError, match="I32"):
        dequantize(file, file.tensors["weight"])


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, build_tiny_model("llama", num_hidden_layers=1))
    return path


def test_every_truncation_is_an_error(tiny_gguf: Path, tmp_path: Path) -> None:
    """Cut within the magic, a count, a key, a string array, the tensor table, and the data."""
    content = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    data_start = min(tensor.offset_bytes for tensor in GGUFFile(tiny_gguf).tensors.values())
    lengths = [0, 2, 6, 20, *range(30, data_start, 97), len(content) - 40000, len(content) - 1]
    for length in lengths:
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_headers_that_lie_are_errors(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    bad = tmp_path / "bad.gguf"
    for change, message in (
        (b"GGML" + content[4:], "not a GGUF file"),
        (content[:4] + struct.pack("<I", 1) + content[8:], "version 1"),
        (content[:8] + struct.pack("<Q", 2**60) + content[16:], "truncated|unknown"),
        (content[:16] + struct.pack("<Q", 2**60) + content[24:], "truncated|unknown"),
    ):
        bad.write_bytes(change)
        with pytest.raises(CheckpointError, match=message):
            GGUFFile(bad)
    with pytest.raises(CheckpointError, match="cannot read"):
        GGUFFile(tmp_path / "absent.gguf")


def test_other_architectures_list_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"falcon.*llama, qwen2, qwen3"):
        read_model_config(resolve_model(str(path)))


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    extra = {"blk.0.ssm_in.weight": np.zeros((4, 4), np.float32)}
    write_gguf(path, build_tiny_model("llama", num_hidden_layers=1), extra_tensors=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_in\.weight"):
        load(path, select_backend("cpu", CPU))
