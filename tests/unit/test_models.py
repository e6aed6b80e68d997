"""Models against Transformers in float32, through a paged cache in every arrangement.

A wrong rotary angle, mask, head order or slot changes logits of this size by far more than the
tolerance; agreement over all positions by luck is out of the question.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.registry import select_backend
from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.errors import CheckpointError, UnsupportedModelError
from engine.models.registry import model_class, supported_architectures
from tests.tiny_models import build_tiny_checkpoint, build_tiny_model
from tests.unit.paged_runs import (
    CPU,
    LENGTHS,
    STEPS,
    assert_same_logits,
    load,
    make_prompts,
    run_in_steps,
)

pytestmark = pytest.mark.usefixtures("several_threads")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama head_dim": ("llama", {"head_dim": 24}),
    "llama no groups": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 1000.0}}),
    "llama yarn mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 bias": ("qwen3", {"attention_bias": True}),
    "qwen3 layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral window": ("mistral", {}),
    "mistral no window": ("mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    build_tiny_checkpoint(tmp_path, family, seed=3, **overrides)
    backend = select_backend("cpu", CPU)
    model = load(tmp_path, backend)
    assert type(model).__module__ != "engine.models.transformers_backend"
    prompts = make_prompts(LENGTHS)
    results = run_in_steps(model, backend, prompts, STEPS)
    reference = build_tiny_model(family, seed=3, **overrides)
    assert_same_logits(reference, prompts, results, least_spread=0.3)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_reference_backend_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, family)
    prompts, results = make_prompts(LENGTHS), []
    for name in ("cpu", "torch_reference"):
        backend = select_backend(name, CPU)
        results.append(run_in_steps(load(tmp_path, backend), backend, prompts, STEPS))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """Packed weights, fused residuals: one wrong operand moves logits by about their spread, 1."""
    build_tiny_checkpoint(tmp_path, "llama", hidden_size=128, attention_bias=True, mlp_bias=True)
    backend = select_backend("cpu", CPU)
    prompts = make_prompts(LENGTHS)
    runs = [
        run_in_steps(load(tmp_path, backend, dtype), backend, prompts, STEPS, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for exact, rounded in zip(*runs, strict=True):
        assert (exact - rounded).abs().mean() < 0.05 * exact.std()


def test_dynamic_rope_beyond_the_original_length(tmp_path: Path) -> None:
    """Token by token, as Transformers generates with a cache, past max_position_embeddings."""
    overrides = {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    }
    build_tiny_checkpoint(tmp_path, "llama", **overrides)
    assert read_model_config(resolve_model(str(tmp_path))).max_position_embeddings == 32
    backend = select_backend("cpu", CPU)
    prompts = make_prompts((30,))
    result = run_in_steps(load(tmp_path, backend), backend, prompts, [[1]] * 30)[0]
    reference = build_tiny_model("llama", **overrides)
    cache, expected = None, []
    with torch.inference_mode():
        for token in prompts[0]:
            output = reference(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            expected.append(output.logits[0])
    torch.testing.assert_close(result, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_shards_and_a_single_file_load_the_same(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path / "one", "qwen2")
    build_tiny_checkpoint(tmp_path / "many", "qwen2", num_shards=3)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) >= 3
    backend = select_backend("cpu", CPU)
    one, many = (load(tmp_path / name, backend).state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert len(one) > 10
    assert all(torch.equal(one[name], many[name]) for name in one)


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    change_weights(tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path, select_backend("cpu", CPU))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    name, message = "model.layers.0.self_attn.q_proj.bias", r"unexpected tensor '.*q_proj\.bias'"
    change_weights(tmp_path, lambda weights: weights.update({name: torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, select_backend("cpu", CPU))


def test_a_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    name = "model.layers.2.self_attn.k_proj.weight"
    change_weights(tmp_path, lambda weights: weights.update({name: torch.zeros(64, 64)}))
    with pytest.raises(CheckpointError, match=r"k_proj.*\(64, 64\).*\(32, 64\)"):
        load(tmp_path, select_backend("cpu", CPU))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        load(tmp_path, select_backend("cpu", CPU))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama", num_shards=3)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        load(tmp_path, select_backend("cpu", CPU))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load(tmp_path, select_backend("cpu", CPU))


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path, "llama")
    text = (folder / "config.json").read_text().replace("LlamaForCausalLM", "BonsaiForCausalLM")
    (folder / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError) as caught:
        model_class(read_model_config(resolve_model(str(folder))))
    assert "BonsaiForCausalLM" in str(caught.value)
    assert all(name in str(caught.value) for name in supported_architectures())
