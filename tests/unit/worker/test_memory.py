"""Memory facts: what a model's tensors take, the peak of a block, and the components' sum."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.executor.uniproc import UniprocExecutor
from engine.layers.linear import can_pack, pack_weight
from engine.worker import worker as worker_module
from engine.worker.memory import PeakMemory, model_bytes, used_bytes
from instrumentation import NULL
from tests.tiny_models import build_tiny_checkpoint

CPU = torch.device("cpu")


class Tensors(nn.Module):
    """A module with a parameter, a buffer, a plain attribute, a tied weight and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100, 30))
        self.tied = self.weight
        self.register_buffer("table", torch.zeros(50, dtype=torch.bfloat16))
        self.rows = self.weight.data[10:20]
        self.attribute = torch.zeros(7, dtype=torch.int64)
        self.nothing: torch.Tensor | None = None


def test_each_tensor_counts_once_however_often_it_is_reachable() -> None:
    inner = Tensors()
    model = nn.ModuleList([inner, inner, nn.Sequential(inner)])
    assert model_bytes(model) == 100 * 30 * 4 + 50 * 2 + 7 * 8


def test_packed_weights_count_as_they_lie_in_memory() -> None:
    dense = torch.randn(577, 1_537).to(torch.bfloat16)
    if not can_pack(dense):
        pytest.skip("this processor packs no weights")
    model = nn.Module()
    model.weight = nn.Parameter(pack_weight(dense), requires_grad=False)
    model.head = pack_weight(dense[:64])
    # oneDNN pads to whole tiles, so it is never less than the numbers themselves take.
    least = dense.nbytes + dense[:64].nbytes
    assert least <= model_bytes(model) <= 1.2 * least


def test_the_peak_is_what_was_held_on_top() -> None:
    with PeakMemory(CPU) as memory:
        held = np.ones(200 << 20, dtype=np.uint8)
        del held
    assert memory.peak_bytes >= 195 << 20
    assert abs(memory.used_before_bytes - used_bytes(CPU)) < 100 << 20


def test_the_components_of_a_core_that_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = worker_module.read_model_config
    monkeypatch.setattr(
        worker_module, "read_model_config", lambda source: reads.append(source) or read(source)
    )
    folder = build_tiny_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=1_024)
    config = EngineConfig.from_kwargs(
        model=str(folder), num_gpu_blocks_override=4_000, max_num_batched_tokens=64, dtype="float32"
    )
    core = EngineCore(config, UniprocExecutor, obs=NULL)
    ready = core.ready_response()
    in_use = used_bytes(CPU)
    core.shutdown()

    memory = ready.memory_bytes
    assert list(memory) == ["weights", "kv_cache", "graphs", "activations", "other"]
    checkpoint_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert memory["weights"] == pytest.approx(checkpoint_bytes, rel=0.1)
    assert memory["kv_cache"] == ready.kv_cache_bytes == 4_000 * 16 * 3 * 2 * 2 * 64 * 4
    assert memory["graphs"] == 0
    assert min(memory.values()) >= 0
    # The KV cache is hardly touched yet; all else of it is in the process, or was at its peak.
    without_cache = sum(memory.values()) - memory["kv_cache"]
    assert without_cache - memory["activations"] == pytest.approx(in_use, abs=256 << 20)
    assert reads == [core.executor._worker.source]  # type: ignore[attr-defined]
    assert core.executor.model_config.vocab_size == 128
