"""Checkpoints and references that the integration tests share, made once a session.

Knows where models come from. Does not know what is tested with them.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.levels import VARIABLE
from tests.support.reference import ReferenceModel, load_gguf_llama, varied_text
from tests.support.server_process import ServerProcess
from tests.tiny_models import FAMILIES, build_tiny_checkpoint

LEVEL = os.environ.get(VARIABLE)
"""Of processor, that these tests run for; None: the processor as it is."""
CPU_KERNELS = {} if LEVEL is None else {"cpu_kernels": "torch"}
QUIET = {"log_level": "warning"} | CPU_KERNELS
EXACT = QUIET | {"dtype": "float32"}
"""For the embedded model, wherever texts or numbers of two runs are compared, or a text with one
that is written down. In bfloat16, its default, the same request is rounded otherwise in a batch of
another shape, and on another processor; `test_bf16.py` says by how much."""
SMALL = QUIET | {"kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 256}
"""Settings for a tiny model that comes up in a moment."""

_TIES_KEY = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family of `FAMILIES`, by family."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: build_tiny_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def tiny_references(tiny_folders: dict[str, Path]) -> dict[str, ReferenceModel]:
    """Transformers' model of each tiny checkpoint."""
    from transformers import AutoModelForCausalLM

    return {
        family: ReferenceModel(
            AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        )
        for family, folder in tiny_folders.items()
    }


@pytest.fixture(scope="session")
def tiny_llama(tiny_folders: dict[str, Path]) -> Path:
    """The tiny Llama checkpoint."""
    return tiny_folders["llama"]


@pytest.fixture(scope="session")
def text_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a long context and a tokenizer of one token a byte."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("text") / "llama"
    build_tiny_checkpoint(folder, "llama", vocab_size=256, max_position_embeddings=32768)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context in which a generation lasts for many seconds."""
    folder = tmp_path_factory.mktemp("long") / "llama"
    return build_tiny_checkpoint(folder, "llama", max_position_embeddings=32768)


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[ServerProcess]:
    """A server of the embedded model, for tests that leave it as they find it."""
    flags = ("--kv-cache-memory-bytes", str(512 << 20), "--max-logprobs", "2000")
    exact = ("--dtype", EXACT["dtype"], "--cpu-kernels", EXACT.get("cpu_kernels", "auto"))
    with ServerProcess(*exact, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def embedded_reference() -> ReferenceModel:
    """The embedded model in Transformers, float32."""
    from engine.checkpoint.locate import embedded_model_path

    return ReferenceModel(load_gguf_llama(embedded_model_path()), ignore_eos=True)


@pytest.fixture(scope="session")
def embedded_prompts() -> list[list[int]]:
    """24 texts of 5 to 1,500 tokens, as token ids of the embedded model."""
    from engine.checkpoint.locate import resolve_model
    from engine.text.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(resolve_model(None))
    lengths = [round(5 * 300 ** (number / 23)) for number in range(24)]
    prompts = [
        tokenizer.encode(varied_text(number, num_words=length))[:length]
        for number, length in enumerate(lengths)
    ]
    assert [len(prompt) for prompt in prompts] == lengths
    return prompts


@pytest.fixture
def count_tie(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Call it with the ties that a comparison accepted; the session's total is reported."""
    stash = request.config.stash

    def add(ties: int) -> None:
        stash[_TIES_KEY] = stash.get(_TIES_KEY, 0) + ties

    return add


def pytest_report_header() -> str | None:
    """Say at which level the tests run."""
    if LEVEL is None:
        return None
    import torch

    found = torch.backends.cpu.get_cpu_capability()
    return f"level {LEVEL}: PyTorch has kernels for {found}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many rounding ties the comparisons have accepted; 0 is expected."""
    if _TIES_KEY in config.stash:
        terminalreporter.write_line(f"greedy ties accepted: {config.stash[_TIES_KEY]}")
