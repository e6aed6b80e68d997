"""Wrong arguments of the offline API: a named error that says what to do, and nothing harmed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, ConfigError, LogitsProcessor, PromptError, RequestError, SamplingParams
from engine.errors import IsinglassError
from tests.integration.conftest import EXACT, SMALL
from tests.support.scripts import script
from tests.waiting import PATIENCE_S

GREEDY = SamplingParams(temperature=0, max_tokens=4)
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=128, **EXACT) as llm:
        yield llm


WRONG_CALLS: list[tuple[Callable[[LLM], Any], type[IsinglassError], str]] = [
    (lambda llm: llm.generate("a", 5), RequestError, "sampling_params must be SamplingParams"),
    (lambda llm: llm.generate("a", "b"), RequestError, "sampling_params must be SamplingParams"),
    (lambda llm: llm.generate(None), PromptError, "a prompt must be a string"),
    (lambda llm: llm.generate("\ud800"), PromptError, "lone surrogate"),
    (
        lambda llm: llm.generate({"prompt": "a", "cache_salt": "\udc00"}),
        PromptError,
        "cache_salt must have no lone surrogates",
    ),
    (lambda llm: llm.generate("a", SamplingParams(stop="\udc00")), RequestError, "surrogates"),
    (lambda llm: llm.encode(None), PromptError, "encode takes a text or a list of texts"),
    (lambda llm: llm.encode([5]), PromptError, "a text must be a string"),
    (lambda llm: llm.decode("abc"), PromptError, "token ids must be a list of integers"),
    (lambda llm: llm.decode(5), PromptError, "token ids must be a list of integers"),
    (lambda llm: llm.decode([5, -1]), PromptError, "token id -1 at position 1"),
    (lambda llm: llm.decode([2**32]), PromptError, "at position 0 .* from 0 to 4294967295"),
    (lambda llm: llm.decode([3, 49_152]), PromptError, "token id 49152 is outside .* 0 to 49151"),
    (lambda llm: llm.chat(CHAT, tools=5), PromptError, "tools must be a list of JSON schemas"),
    (lambda llm: llm.chat(CHAT, tools={"a": 1}), PromptError, "tools must be a list"),
    (
        lambda llm: llm.chat(CHAT, chat_template_kwargs=[1]),
        PromptError,
        "chat_template_kwargs must be a dictionary",
    ),
    *[
        (
            lambda llm, name=name: llm.chat(CHAT, chat_template_kwargs={name: True}),
            PromptError,
            f"chat_template_kwargs must not hold {name}",
        )
        for name in ("messages", "add_generation_prompt", "tokenize", "tools", "self")
    ],
    *[
        (
            lambda llm, wrong=wrong: llm.llm_engine.add_request("r", "a", GREEDY, **wrong),
            RequestError,
            next(iter(wrong)),
        )
        for wrong in (
            {"arrival_ns": 1.5},
            {"arrival_ns": -1},
            {"arrival_ns": 2**63},
            {"traceparent": 5},
            {"traceparent": "\udc00"},
        )
    ],
    *[
        (
            lambda llm, wrong=wrong: llm.llm_engine.add_request(wrong, "a", GREEDY),
            RequestError,
            "request_id must be a string",
        )
        for wrong in (5, None, "", "\udc00", ["a"])
    ],
]


@pytest.mark.parametrize(
    ("call", "error", "message"), WRONG_CALLS, ids=[message for _, _, message in WRONG_CALLS]
)
def test_a_wrong_call_is_named_and_harms_nothing(
    call: Callable[[LLM], Any], error: type[IsinglassError], message: str, llm: LLM
) -> None:
    with pytest.raises(error, match=message):
        call(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    (output,) = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris")


def test_ids_that_the_engine_knows_are_decoded(llm: LLM) -> None:
    ids = llm.encode("Hello there")[0]
    assert llm.decode(ids) == llm.decode(tuple(ids)) == "Hello there"
    assert llm.decode([]) == ""


class Takes(LogitsProcessor):
    """Never made: its instance or a function is given by mistake."""

    def __init__(self) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logits_processors": [Takes()]}, "must hold classes or their names"),
        ({"logits_processors": [lambda: None]}, "not an instance or a function"),
        ({"logits_processors": [5]}, "must hold classes or their names"),
        ({"trace_dir": ""}, "trace_dir is empty"),
        ({"trace_dir": " "}, "trace_dir is empty"),
        ({"trace_dir": "a\0b"}, "trace_dir .* cannot be used: embedded null byte"),
        ({"trace_dir": "~nobody-has-this-name/x"}, "trace_dir .* cannot be used"),
        ({"revision": "main"}, "revision='main' .* is a local one; leave revision out"),
        ({"max_num_seqs": 10**9}, "not enough memory for max_num_seqs=1000000000 and max_model_l"),
        ({"max_num_seqs": 10**20}, "not enough memory for max_num_seqs=1000"),
        ({"kv_cache_memory_bytes": 10**16}, "kv_cache_memory_bytes=1.* makes a KV cache of"),
        ({"num_gpu_blocks_override": 10**12}, "num_gpu_blocks_override=1.* makes a KV cache of"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    settings: dict[str, Any],
    message: str,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_llama, skip_tokenizer_init=True, **(SMALL | settings))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_processor_below_the_guard_of_the_script(tiny_llama: Path) -> None:
    body = """
from engine import LogitsProcessor, ConfigError
if __name__ == "__main__":
    class Mine(LogitsProcessor):
        def __init__(self, config, device, is_pin_memory): pass
        def is_argmax_invariant(self): return False
        def update_state(self, batch_update): pass
        def apply(self, logits): return logits
    try:
        start(logits_processors=[Mine])
    except ConfigError as error:
        say("refused", error)
"""
    with script(body, model=tiny_llama) as running:
        said = running.wait_for("refused")
        assert "'Mine' is defined in the script itself" in said
        assert "Put it in a module that can be imported" in said
        assert "__mp_main__" not in said
        running.finish()


def test_a_full_disk_below_the_text_of_the_command() -> None:
    command = f"{sys.executable} -m engine.cli.main generate Hi --max-tokens 2 > /dev/full"
    done = subprocess.run(
        ["sh", "-c", command],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "isinglass: error: [Errno 28] No space left on device\n"
