"""The engine core computes with what a level of processor leaves it (see `tests/levels.py`)."""

import os
import re
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from tests.integration.conftest import SMALL
from tests.levels import LEVELS, VARIABLE

RUNNING = os.environ.get(VARIABLE)
"""The level at which all tests run, if there is one."""


@pytest.mark.parametrize("level", [RUNNING] if RUNNING else LEVELS)
def test_better_features_are_hidden_from_the_core(
    level: str,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in LEVELS[level].items():
        assert not RUNNING or os.environ[name] == value
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ONEDNN_VERBOSE", "1")
    processors = ["tests.support.processors:TellsKernels"]
    settings = SMALL | {"skip_tokenizer_init": True, "log_level": "info", "cpu_kernels": "torch"}
    with LLM(tiny_llama, logits_processors=processors, **settings) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    out, err = capfd.readouterr()
    (capability,) = re.findall(r"the core's PyTorch has kernels for (\w+)", err)
    assert capability in ("DEFAULT", "AVX2", "AVX512")
    assert capability != "AVX512" or level == "avx512"
    # oneDNN multiplies bfloat16 where there is AVX-512, and says for which instructions.
    told = re.findall(r"onednn_verbose,v1,info,cpu,isa:(.*)", out + err)
    assert told or capability != "AVX512"
    for isa in told:
        assert not re.search("AMX|bfloat16|Matrix", isa), isa
        assert level == "avx512" or "AVX-512" not in isa, isa
