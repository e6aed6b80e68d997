"""`isinglass serve`'s command line and config file: what is taken, what wins, what is refused."""

import argparse
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine.attention.registry import attention_backend_names
from engine.cli.config_file import read_config_file
from engine.cli.main import build_parser, main
from engine.config import ATTENTION_BACKENDS, GROUPS, EngineConfig
from engine.errors import ConfigError
from engine.server.config import ServerConfig
from engine.server.http.listening import listening
from engine.server.openai.tools.chat_templates import load_chat_template

LISTS = {"port": False, "max_model_len": False, "served_model_name": True, "model": False}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, dict[str, Any]]]:
    """What would have been served."""
    seen: list[tuple[ServerConfig, dict[str, Any]]] = []

    def run(config: ServerConfig, arguments: dict[str, Any]) -> int:
        EngineConfig.from_kwargs(**arguments)
        seen.append((config, arguments))
        return 0

    monkeypatch.setattr("engine.server.process.serve.run_server", run)
    return seen


def test_a_signal_before_there_is_a_server_ends_the_command_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "engine.server.process.serve.run_server", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 0


def serve_parser() -> argparse.ArgumentParser:
    (commands,) = [
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    parser: argparse.ArgumentParser = commands.choices["serve"]
    return parser


def test_every_setting_is_a_flag_in_a_group_with_help() -> None:
    parser = serve_parser()
    by_name = {action.dest: action for action in parser._actions}
    settings = [spec.name for kind in (ServerConfig, *GROUPS.values()) for spec in fields(kind)]
    assert len(settings) == len(set(settings)), "two settings of one name"
    for name in set(settings) - {"enable_multiprocessing"}:
        assert by_name[name].help
        assert by_name[name].default is None, "an absent flag must leave the file in force"
    in_groups = [action.dest for group in parser._action_groups for action in group._group_actions]
    assert sorted(in_groups) == sorted(action.dest for action in parser._actions)
    text = parser.format_help()
    for words in ("server: who may use it", "engine: scheduler", "exit codes:", "--config FILE"):
        assert words in text
    assert "(default: )" not in text
    assert "Headers allowed to them. (default: *)" in " ".join(text.split())


def test_flags_win_over_the_file_and_the_file_over_defaults(
    served: list[tuple[ServerConfig, dict[str, Any]]], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "# a comment\nmodel: from-file\nport: 9000\nhost: 0.0.0.0\nmax-num-seqs: 7\n"
        "served_model_name: [a, b]\napi-key: one-alone\nenable_docs: no\nshutdown-timeout: 5\n"
    )
    assert main(["serve", "--config", str(file), "--port", "1", "--api-key", "k1", "k2"]) == 0
    assert main(["serve", "on-line", "--config", str(file), "--max-num-seqs", "3"]) == 0
    (first, engine), (second, other_engine) = served
    assert (first.port, first.host, first.enable_docs) == (1, "0.0.0.0", False)
    assert (first.served_model_name, first.api_key) == (("a", "b"), ("k1", "k2"))
    assert engine == {"model": "from-file", "max_num_seqs": 7, "max_logprobs": 20}
    assert (second.port, second.api_key, second.shutdown_timeout) == (9000, ("one-alone",), 5)
    assert other_engine == {"model": "on-line", "max_num_seqs": 3, "max_logprobs": 20}


def test_flags_of_several_values_may_be_repeated(
    served: list[tuple[ServerConfig, dict[str, Any]]],
) -> None:
    assert main(["serve", "--api-key", "a", "b", "--port", "5", "--api-key", "c"]) == 0
    assert served[0][0].api_key == ("a", "b", "c")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    for text in ("", "# nothing\n", "---\n"):
        file.write_text(text)
        assert read_config_file(str(file), LISTS) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 5", r"unknown setting 'max-model-length'.*mean max_model_len\?"),
        ("port: 1\nport: 2", "port is set twice"),
        ("max-model-len: 1\nmax_model_len: 2", "max_model_len is set twice"),
        ("port: {nested: 1}", "port holds further settings; they all belong to the top level"),
        ("- port", "expected lines of the form 'setting: value'"),
        ("just text", "expected lines of the form"),
        ("port: [1", "is not YAML"),
        ("port: !!python/object/apply:os.getcwd []", "is not YAML: could not determine"),
        ("port: *nobody", "is not YAML"),
        ("\x00", "is not YAML"),
        ("[" * 2000, "is nested too deep"),
        ("7: 1", "unknown setting '7'"),
        ("model: x\nmax-model-len:", "max-model-len has no value; leave the line out for the def"),
        ("served_model_name: null", "served_model_name has no value"),
    ],
)
def test_what_a_file_must_not_be(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config_file(str(file), LISTS)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: '9000'", "port must be int, got '9000' (str)"),
        ("api_key: [123]", "api_key must be text, got [123]; quote it."),
        ("enable_docs: 1", "enable_docs must be bool, got 1 (int)"),
        ("max_num_seqs: [1, 2]", "max_num_seqs must be int, got [1, 2] (list)"),
        ("port: 70000", "port must be at most 65535, got 70000"),
    ],
)
def test_values_are_checked_as_those_of_flags(
    text: str,
    message: str,
    tmp_path: Path,
    served: list[tuple[ServerConfig, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 1
    assert capsys.readouterr().err == f"isinglass: error: {file}: {message}\n"
    assert not served


@pytest.mark.usefixtures("ascii_locale")
def test_files_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    file, template = tmp_path / "serve.yaml", tmp_path / "chat.jinja"
    file.write_text("# größer\nserved_model_name: größer\n", encoding="utf-8")
    assert read_config_file(str(file), LISTS) == {"served_model_name": ["größer"]}
    template.write_text("größer", encoding="utf-8")
    assert load_chat_template(ServerConfig(chat_template=str(template))) == "größer"


def test_a_template_that_is_none_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% if %}")
    for given in ("{% if %}", str(file), "{{ " + "(" * 3000):
        with pytest.raises(ConfigError, match=r"^chat_template: the chat template"):
            load_chat_template(ServerConfig(chat_template=given))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "a" * 300}, "cannot listen at aaa.*label too long"),
        ({"host": "a\0b"}, "cannot listen at a"),
        ({"uds": "a\0b"}, "cannot listen at a.*null"),
        ({"uds": "/tmp/" + "a" * 300}, "cannot listen at /tmp/aaa.*too long"),
        ({"uds": "/tmp/" + "a" * 150}, "cannot listen at /tmp/aaa.*too long"),
    ],
)
def test_addresses_that_cannot_be_listened_at_are_told(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message), listening(ServerConfig(**settings)):
        raise AssertionError("it listens")


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        assert main(["serve", "--config", str(path)]) == 1
        assert "the config file cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-model-length", "5"], "unknown option --max-model-length; did you mean"),
        (["serve", "--prot=5"], "unknown option --prot; did you mean --port?"),
        (["serve", "--zzzz"], "unknown option --zzzz (see"),
        (["serve", "--max-num-seq", "4"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--dtype", "bfloat1"], "did you mean bfloat16?"),
        (["bench", "serv"], "did you mean serve?"),
        (["serve", "--shutdown-timeout-s", "5"], "did you mean --shutdown-timeout?"),
        (["serve", "--model", "x"], "unknown option --model: the model is the first argument"),
        (["bench", "serve", "--host", "x"], "unknown option --host: give --base-url"),
        (["serve", "a", "b"], "too many arguments: b"),
        (["serve", "--port", "abc"], "argument --port: invalid int value: 'abc'"),
        (["serve", "--log-level", "loud"], "invalid choice: 'loud' (choose from"),
        (["generate", "--dtpe", "x", "Hi"], "unknown option --dtpe; did you mean --dtype?"),
        (["serv"], "invalid choice: 'serv' (choose from"),
        (["serv"], "; did you mean serve?"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage_is_told_shortly(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.endswith(" --help`)\n")


def test_names_of_attention_backends_agree() -> None:
    assert ("auto", *attention_backend_names()) == ATTENTION_BACKENDS


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:0:1", ""])
def test_devices_that_no_machine_has_are_refused_before_a_core_starts(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N; got"):
        EngineConfig.from_kwargs(device=device)
