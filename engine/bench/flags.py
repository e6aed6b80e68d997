"""The flags of `isinglass bench serve`, in groups, and the help that teaches them.

Knows flags. Does not know what they make (`cli.py` does).
"""

import argparse
import json
import math
from pathlib import Path

from engine.bench.definitions import DEFINITIONS

_DESCRIPTION = """\
Send a load to any OpenAI-compatible server and measure what its users would see.

Three kinds of load:
  open loop     --request-rate R        requests come by the clock (Poisson; see --burstiness),
                                        however slow the server is: users do not wait for users
  burst         (no rate)               all at once: how a queue drains
  closed loop   --max-concurrency C     C requests always in flight: the most a server can do;
                (no rate)               its latencies say little about users

The last line of standard output is one JSON document. Flags and keys have the names of
`vllm bench serve` where that has them.
"""

_EXAMPLES = """\
examples:
  isinglass bench serve --request-rate 4 --num-prompts 200
  isinglass bench serve --max-concurrency 32 --duration 60 --ignore-eos --plot load.svg
  isinglass bench serve --request-rate 8 --goodput ttft:200 tpot:50 --endpoint chat
  isinglass bench serve --dataset-name shared-prefix --num-prefixes 8 --prefix-len 512
  isinglass bench serve --dataset-path prompts.jsonl --save result.json | tail -1 | jq .p99_ttft_ms

exit codes: 0 done, failed requests included (they are counted); 1 a setting is out of range,
the server is not there, no request succeeded, or (after the report) a file could not be
written; 2 a flag that is not known or lacks its value; 130 Ctrl-C,
after the report of what there is.
"""


def serve_parser(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    """Mount `serve` with its flags."""
    parser = kinds.add_parser(
        "serve",
        help="send a load to an OpenAI-compatible server",
        description=_DESCRIPTION,
        epilog=f"{DEFINITIONS}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_server_flags(parser)
    _add_arrival_flags(parser)
    _add_prompt_flags(parser)
    _add_request_flags(parser)
    _add_report_flags(parser)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="with or without /v1 at its end (default: %(default)s)",
    )
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="/v1/completions or /v1/chat/completions (default: %(default)s)",
    )
    group.add_argument("--model", help="default: the first that /v1/models names")
    group.add_argument(
        "--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY"
    )
    group.add_argument(
        "--header",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="sent with every request; wins over what is sent anyway, --api-key included",
    )
    group.add_argument("--insecure", action="store_true", help="do not verify TLS certificates")
    group.add_argument(
        "--ready-timeout",
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="wait so long for /health (or /v1/models) to answer 200 (default: %(default)g)",
    )


def _add_arrival_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="requests to send (default: 1000, or as many as --duration allows)",
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="SECONDS",
        help="send for so long; what is in flight then is waited for",
    )
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests per second; inf sends as fast as --max-concurrency allows (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="shape of the gamma distribution of gaps: 1 Poisson, less in bursts, more regular "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="C",
        help="requests in flight at most; with --request-rate the others wait here, and their "
        "wait counts in the rows `from intended`. Without a rate a place is sent its next "
        "request when the last is over (a tenth of a second later if it failed)",
    )
    group.add_argument(
        "--num-warmups",
        type=int,
        default=0,
        metavar="N",
        help="requests before the measurement, with prompts of their own; in no figure",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="the same arrivals, prompts and lengths again"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="from sending a request to the end of its stream (default: %(default)g)",
    )


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=("random", "fixed", "shared-prefix", "prefix_repetition", "custom"),
        help="random words; one fixed text; several prefixes (in chat: system messages) with many "
        "suffixes each; the lines of --dataset-path (default: random, custom with a path)",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="JSONL: {prompt: text or token ids, or messages: […], max_tokens: N}; other keys go "
        "into the request's body",
    )
    group.add_argument("--prompt", metavar="TEXT", help="the text of `fixed`")
    group.add_argument(
        "--input-len",
        "--random-input-len",
        "--prefix-repetition-suffix-len",
        type=int,
        metavar="N",
        help="words of a prompt, or of a suffix; a word is a token in most vocabularies, and "
        "what the server counted is reported (default: 128)",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--prefix-repetition-output-len",
        "--custom-output-len",
        type=int,
        default=128,
        metavar="N",
        help="tokens to ask for (max_tokens; max_completion_tokens in chat); with --ignore-eos so "
        "many come (default: %(default)s)",
    )
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=float,
        metavar="X",
        help="draw lengths between len × (1 - X) and len × (1 + X), from 0 to 1 (default: 0)",
    )
    group.add_argument(
        "--token-ids",
        metavar="LOW:HIGH",
        help="send random token ids of this half-open range in place of words (completions)",
    )
    group.add_argument(
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        type=int,
        metavar="N",
        help="prefixes of `shared-prefix` (default: 8)",
    )
    group.add_argument(
        "--prefix-len",
        "--prefix-repetition-prefix-len",
        type=int,
        metavar="N",
        help="words of each of them (default: 256)",
    )


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="always make --output-len tokens (vLLM, SGLang and this server)",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="(default: %(default)g)"
    )
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="more keys of each request"
    )
    group.add_argument(
        "--request-id-prefix",
        default="bench-",
        metavar="TEXT",
        help="X-Request-Id is this and the request's number (default: %(default)s)",
    )


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help="rows of the table, with commas (default: %(default)s)",
    )
    group.add_argument(
        "--metric-percentiles",
        default="50,90,95,99",
        metavar="PERCENTS",
        help="with commas (default: %(default)s)",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="limits that a good request keeps: ttft, tpot, e2el, such as ttft:200 tpot:50; "
        "judged from the intended time",
    )
    group.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="the same as ttft:MS")
    group.add_argument(
        "--slo-tpot-ms",
        "--slo-itl-ms",
        type=float,
        metavar="MS",
        help="the same as tpot:MS, the mean gap per token of a request",
    )
    group.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="the same as e2el:MS")
    group.add_argument("--save", type=Path, metavar="FILE", help="write the JSON document there")
    group.add_argument(
        "--save-detailed", action="store_true", help="and each request's record into that file"
    )
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the run, as SVG")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
