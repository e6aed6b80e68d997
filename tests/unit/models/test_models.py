"""Models against Transformers in float32, through a paged cache in every arrangement.

A wrong rotary angle, mask, head order or slot changes logits of this size by far more than the
tolerance; agreement over all positions by luck is out of the question.
"""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.attention.registry import select_backend
from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.errors import CheckpointError, UnsupportedModelError
from engine.models.registry import model_class, supported_architectures
from tests.support.paged_runs import (
    CPU,
    LENGTHS,
    STEPS,
    assert_same_logits,
    load,
    make_prompts,
    run_in_steps,
)
from tests.tiny_models import build_tiny_checkpoint, build_tiny_model

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


def test_dynamic_rope_beyond_the_original_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Token by token, as Transformers generates with a cache, past max_position_embeddings."""
    overrides = {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    }
    build_tiny_checkpoint(tmp_path, "llama", **overrides)
    assert read_model_config(resolve_model(str(tmp_path))).max_position_embeddings == 32
    backend = select_backend("cpu", CPU)
    prompts = make_prompts((30,))
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, backend)
    assert "'dynamic': beyond 16 tokens" in caplog.text
    result = run_in_steps(model, backend, prompts, [[1]] * 30)[0]
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


def logits_of(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    backend = select_backend("cpu", CPU)
    return run_in_steps(load(folder, backend), backend, prompts, STEPS)


@pytest.mark.parametrize("family", ["llama", "CohereForCausalLM"])
def test_a_head_that_the_configuration_denies_is_used_as_transformers_does(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other tokens come out without it, so no agreement by luck."""
    build_tiny_checkpoint(tmp_path, family, tie_word_embeddings=True)
    head = torch.randn(128, 64, generator=torch.Generator().manual_seed(9)) / 4
    change_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": head}))
    prompts = make_prompts(LENGTHS)
    with caplog.at_level(logging.WARNING):
        results = logits_of(tmp_path, prompts)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reference.lm_head.weight, head)
    assert_same_logits(reference, prompts, results, least_spread=0.05)
    if family == "llama":
        assert "lm_head.weight is there and differs" in caplog.text


def test_a_head_that_repeats_the_embedding_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)

    def repeat(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    change_weights(tmp_path, repeat)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, select_backend("cpu", CPU))
    assert model.head is None
    assert model.is_tied
    assert not caplog.text


def test_the_one_matrix_may_come_under_the_name_of_the_head(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)

    def rename(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")

    change_weights(tmp_path, rename)
    prompts = make_prompts(LENGTHS)
    results = logits_of(tmp_path, prompts)
    reference = build_tiny_model("llama", tie_word_embeddings=True)
    assert_same_logits(reference, prompts, results, least_spread=0.3)


# A key that another family reads: Transformers' class of this one ignores it.
FOREIGN_KEYS = {
    "llama window": ("llama", {"sliding_window": 8}),
    "mistral biases": ("mistral", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 MLP biases": ("qwen2", {"mlp_bias": True}),
    "qwen3 MLP biases": ("qwen3", {"mlp_bias": True}),
}


@pytest.mark.parametrize("case", FOREIGN_KEYS)
def test_keys_of_other_families_are_ignored_as_transformers_does(case: str, tmp_path: Path) -> None:
    family, keys = FOREIGN_KEYS[case]
    build_tiny_checkpoint(tmp_path, family, **keys)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored.items() >= keys.items()
    prompts = make_prompts(LENGTHS)
    reference = build_tiny_model(family, **keys)
    assert_same_logits(reference, prompts, logits_of(tmp_path, prompts), least_spread=0.3)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_without_a_word_in_the_configuration_are_refused(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_tiny_checkpoint(tmp_path, family)
    names: list[str] = []

    def quantise(weights: dict[str, torch.Tensor]) -> None:
        names.append(next(name for name in weights if "mlp" in name and name.endswith("weight")))
        weights[names[0]] = weights[names[0]].to(dtype)
        weights[names[0] + "_scale"] = torch.ones(1)

    change_weights(tmp_path, quantise)
    with pytest.raises(UnsupportedModelError, match=rf"{re.escape(names[0])}' holds .*quantised"):
        load(tmp_path, select_backend("cpu", CPU))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["layernorm.weight", "mlp"])
def test_weights_that_are_not_finite_are_named(
    family: str, number: float, part: str, tmp_path: Path
) -> None:
    build_tiny_checkpoint(tmp_path, family)
    names: list[str] = []

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        names.append(next(name for name in weights if ".1." in name and part in name))
        weights[names[0]].view(-1)[5] = number

    change_weights(tmp_path, spoil)
    with pytest.raises(CheckpointError, match=rf"{re.escape(names[0])}' holds NaN or infinite"):
        load(tmp_path, select_backend("cpu", CPU))


def test_weights_whose_sum_alone_is_not_finite_load(tmp_path: Path) -> None:
    """A sum of half-precision numbers overflows soon."""
    build_tiny_checkpoint(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(tmp_path, lambda weights: weights[name].fill_(1000.0))
    load(tmp_path, select_backend("cpu", CPU), torch.float16)


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
