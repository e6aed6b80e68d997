"""`lm-eval`'s `local-completions` scores a small task of our own against the server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

pytest.importorskip("tenacity", reason="lm-eval without its extra for servers: lm-eval[api]")

QUESTIONS = (
    ("The capital of France is", " Paris", " a turnip"),
    ("The opposite of hot is", " cold", " seventeen"),
    ("Two plus two equals", " four", " bicycle"),
    ("The sun rises in the", " east", " refrigerator"),
)
TASK = """\
task: small_facts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def test_a_small_task_is_scored(embedded_server: ServerProcess, tmp_path: Path) -> None:
    data = tmp_path / "facts.jsonl"
    documents = [
        {"question": q, "choices": [right, wrong], "answer": 0} for q, right, wrong in QUESTIONS
    ]
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "small_facts.yaml").write_text(TASK.format(data=data))
    arguments = ",".join(
        (
            "model=SmolLM2-135M-Instruct",
            f"base_url={embedded_server.url}/v1/completions",
            "tokenizer_backend=remote",
            "tokenized_requests=True",
            "num_concurrent=2",
        )
    )
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", arguments, "--tasks", "small_facts", "--include_path", str(tasks)),
        *("--output_path", str(tmp_path / "results")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command,
        env={"PATH": "", "HOME": str(tmp_path)} | offline,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / "results").rglob("results*.json")
    assert json.loads(report.read_text())["results"]["small_facts"]["acc,none"] == 1.0
