"""The command's flags: what they make, what they refuse, and what they cost other commands."""

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.bench import command
from engine.bench.measure import Objective
from engine.bench.prompts import FilePrompts, FixedPrompts, RandomPrompts, SharedPrefixPrompts
from engine.bench.settings import LoadSettings
from engine.cli import bench as cli
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
VLLM_FLAGS = """
    --base-url http://h:1/v1/ --model m --endpoint chat --request-rate 4 --burstiness 0.5
    --num-prompts 7 --max-concurrency 3 --num-warmups 2 --seed 5 --temperature 0.7
    --dataset-name prefix_repetition --prefix-repetition-prefix-len 11
    --prefix-repetition-suffix-len 12 --prefix-repetition-num-prefixes 13
    --prefix-repetition-output-len 14 --random-range-ratio 0.25 --ignore-eos
    --percentile-metrics ttft,itl --metric-percentiles 25,99.9 --goodput ttft:100 tpot:5
    --header a=b c=d=e --ready-check-timeout-sec 9 --request-id-prefix x- --insecure
"""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from arguments to what the command would run with."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def take(settings: Any, prompts: Any, **options: Any) -> int:
        calls.append((settings, prompts, options))
        return 0

    monkeypatch.setattr(command, "run", take)

    def parse(*arguments: str) -> tuple[LoadSettings, Any, dict[str, Any]]:
        parser = argparse.ArgumentParser()
        cli.add_command(parser.add_subparsers())
        parsed = parser.parse_args(["bench", "serve", *arguments])
        assert parsed.handler(parsed) == 0
        return calls.pop()

    return parse


def test_without_flags_it_is_a_burst_of_a_thousand_random_prompts(given: Any) -> None:
    settings, prompts, options = given()
    assert settings.num_prompts == 1000
    assert math.isinf(settings.request_rate)
    assert not settings.closed_loop
    assert settings.arrival() == "burst: all at once"
    assert isinstance(prompts, RandomPrompts)
    assert options["objective"] is None
    assert options["percents"] == (50, 90, 95, 99)


def test_vllms_names_are_understood(given: Any) -> None:
    settings, prompts, options = given(
        *VLLM_FLAGS.split(),
        "--extra-body",
        '{"top_k": 3}',
    )
    assert settings == LoadSettings(
        base_url="http://h:1/v1/",
        model="m",
        endpoint="chat",
        request_rate=4.0,
        burstiness=0.5,
        num_prompts=7,
        max_concurrency=3,
        num_warmups=2,
        seed=5,
        temperature=0.7,
        ignore_eos=True,
        headers={"a": "b", "c": "d=e"},
        extra_body={"top_k": 3},
        ready_timeout_s=9.0,
        request_id_prefix="x-",
        insecure=True,
    )
    assert settings.url == "http://h:1/v1/chat/completions"
    assert settings.arrival() == "gamma (burstiness 0.5), 4 requests/s, at most 3 in flight"
    assert prompts == SharedPrefixPrompts(
        num_prefixes=13,
        prefix_len=11,
        suffix_len=12,
        output_len=14,
        range_ratio=0.25,
        seed=5,
        chat=True,
    )
    assert options["metrics"] == ("ttft", "itl")
    assert options["percents"] == (25, 99.9)
    assert options["objective"] == Objective(ttft_ms=100, tpot_ms=5)


def test_a_duration_lifts_the_number_of_prompts(given: Any) -> None:
    settings, _, _ = given("--duration", "5", "--max-concurrency", "2")
    assert settings.num_prompts is None
    assert settings.closed_loop
    assert settings.arrival() == "closed loop of 2"


def test_datasets(given: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert isinstance(given("--dataset-path", str(path))[1], FilePrompts)
    fixed = given("--dataset-name", "fixed", "--prompt", "Hi")[1]
    assert fixed == FixedPrompts(text="Hi", output_len=128)
    assert len(given("--dataset-name", "fixed", "--input-len", "9")[1].text.split()) == 9
    assert given("--token-ids", "3:9")[1].token_id_range == (3, 9)


def test_limits_may_be_given_by_flags_of_their_own(given: Any) -> None:
    objective = given("--slo-ttft-ms", "9", "--slo-itl-ms", "2", "--goodput", "e2el:70")[2]
    assert objective["objective"] == Objective(ttft_ms=9, tpot_ms=2, e2el_ms=70)


def test_the_key_comes_from_flag_or_environment_and_is_in_no_document(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert given()[0].api_key is None
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert given()[0].api_key == "from-environment"
    settings = given("--api-key", "from-flag", "--header", "x-secret=from-header")[0]
    assert settings.api_key == "from-flag"
    assert "from-" not in str(settings.document())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--base-url h:8000", "must begin with http"),
        ("--num-prompts 0", "num_prompts must be at least 1"),
        ("--max-concurrency 0", "max_concurrency must be at least 1"),
        ("--request-rate 0", "request_rate must be from 1e-06 to 1e"),
        ("--request-rate nan", "request_rate must be from"),
        ("--request-rate 1e-300", "request_rate must be from"),
        ("--burstiness -1", "burstiness must be from 0.001 to 1e"),
        ("--burstiness inf", "burstiness must be from"),
        ("--burstiness 1e-300", "burstiness must be from"),
        ("--timeout 0", "timeout_s must be more than 0"),
        ("--timeout nan", "timeout_s must be more than 0"),
        ("--duration nan", "duration_s must be more than 0"),
        ("--ready-timeout nan", "ready_timeout_s must be at least 0"),
        ("--num-warmups -1", "num_warmups must be at least 0"),
        ("--temperature nan", "temperature must be a number"),
        ("--temperature inf", "temperature must be a number"),
        ("--temperature -1", "temperature must be a number"),
        ("--range-ratio nan", "from 0 to 1"),
        ("--slo-ttft-ms nan", "more than 0"),
        ("--model ", "model must be a name"),
        ("--duration 5", "needs num_prompts"),
        ("--range-ratio 1.5", "from 0 to 1"),
        ("--input-len 0", "--input-len must be at least 1"),
        ("--dataset-name custom", "go together"),
        ("--dataset-name random --dataset-path x", "go together"),
        ("--prompt hi", "--dataset-name fixed"),
        ("--dataset-name fixed --range-ratio 0.5", "--range-ratio means nothing here"),
        ("--dataset-name fixed --prompt hi --input-len 3", "--input-len means nothing here"),
        ("--num-prefixes 3", "--dataset-name shared-prefix or prefix_repetition"),
        ("--burstiness 0.5", "shapes the gaps of a request_rate"),
        ("--dataset-name fixed --token-ids 1:2", "--dataset-name random"),
        ("--token-ids 5", "LOW:HIGH"),
        ("--token-ids 5:5", "LOW:HIGH"),
        ("--goodput ttft", "ttft:MS"),
        ("--goodput ttft:0", "ttft:MS"),
        ("--goodput itl:5", "ttft:MS"),
        ("--goodput ttft:5 ttft:6", "each once"),
        ("--goodput ttft:5 --slo-ttft-ms 6", "given once"),
        ("--slo-e2e-ms 0", "more than 0"),
        ("--percentile-metrics ttft,foo", "--percentile-metrics"),
        ("--metric-percentiles 50,x", "--metric-percentiles"),
        ("--metric-percentiles 101", "--metric-percentiles"),
        ("--header novalue", "NAME=VALUE"),
        ("--header a=1 a=2", "names a twice"),
        ("--header a=1 A=2", "names? A twice"),
        ('--extra-body {"top_p":NaN}', "cannot be sent as JSON"),
        ('--extra-body {"n":2}', "extra_body may not set n"),
        ('--extra-body {"stream":false}', "extra_body may not set stream"),
        ("--save-detailed", "needs --save"),
        ("--save /nowhere/at/all.json", "is no folder"),
        ("--save /", "--save takes a file, and / is a folder"),
        ("--plot .", "--plot takes a file"),
        ("--save ../a --plot .././a", "name the same file"),
    ],
)
def test_wrong_flags_are_refused_with_words(given: Any, arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(*arguments.split(" "))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://", "scheme://host:port"),
        ("http://:80", "scheme://host:port"),
        ("http://h:x", "scheme://host:port"),
        ("http://h:99999", "scheme://host:port"),
        ("http://[::1", "scheme://host:port"),
        ("http://a b", "scheme://host:port"),
        ("http://a\nb", "scheme://host:port"),
        ("http://" + "a" * 64, "scheme://host:port"),
        ("http://h/?a=b", "no query"),
        ("http://h#f", "no fragment"),
        ("http://me:secret@h", "no user or password"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LoadSettings(base_url=url)
    assert "secret" not in str(caught.value)


def test_hosts_of_all_kinds_are_accepted() -> None:
    for host in ("h", "[::1]:8000", "10.0.0.1:1", "my_host.example.", "bücher.example", "h/prefix"):
        assert LoadSettings(base_url=f"https://{host}/v1").root_url == f"https://{host}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"headers": {"X": "secret\nb"}}, "the value of header X"),
        ({"headers": {"X": "secret\x7f"}}, "the value of header X"),
        ({"headers": {"X": "secret\udc80"}}, "the value of header X"),
        ({"headers": {"X Y": "secret"}}, "'X Y' is no name of a header"),
        ({"headers": {"X\n": "secret"}}, "is no name of a header"),
        ({"headers": {"é": "secret"}}, "is no name of a header"),
        ({"headers": {"x-request-id": "a"}}, "may not set x-request-id; use request_id_prefix"),
        ({"headers": {"Content-Length": "3"}}, "may not set Content-Length"),
        ({"headers": {"Expect": "100-continue"}}, "may not set Expect"),
        ({"api_key": "secret\n"}, "api_key"),
        ({"api_key": " "}, "api_key"),
        ({"request_id_prefix": "a\nb"}, "request_id_prefix must be printable ASCII"),
        ({"request_id_prefix": "é"}, "request_id_prefix must be printable ASCII"),
        ({"request_id_prefix": " a"}, "request_id_prefix must be printable ASCII"),
        ({"extra_body": {"a": "\ud800"}}, "cannot be sent as JSON"),
    ],
)
def test_what_http_cannot_carry_is_refused_without_telling_secrets(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LoadSettings(base_url="http://h", **changes)
    assert "secret" not in str(caught.value)


def test_ordinary_headers_are_accepted() -> None:
    headers = {"X-Tenant": "müller & co\t(1)", "Host": "h", "X-Empty": ""}
    assert LoadSettings(base_url="http://h", headers=headers, request_id_prefix="").headers


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_body_that_is_no_object_is_wrong_usage(given: Any, text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        given("--extra-body", text)
    assert caught.value.code == 2


def test_the_help_defines_the_figures(capsys: pytest.CaptureFixture[str], given: Any) -> None:
    with pytest.raises(SystemExit):
        given("--help")
    text = capsys.readouterr().out
    for word in ("TPOT", "intended", "steady state", "closed loop", "examples:", "exit codes:"):
        assert word in text


def test_mounting_the_command_imports_nothing_heavy() -> None:
    code = (
        "import argparse, sys; from engine.cli import bench; "
        "bench.add_command(argparse.ArgumentParser().add_subparsers()); "
        "print(sorted({'aiohttp', 'rich', 'numpy', 'torch', 'uvloop'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
