"""The served description of the API, taken at its word: whatever it allows, nothing is a 5xx."""

from typing import Any

import hypothesis
import pytest
import schemathesis

from tests.support.server_process import ServerProcess
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PATHS = "^/(v1/(completions|chat/completions|models.*)|tokenize|detokenize|version|health|ping)$"
MAX_TOKENS = 4
MAX_PROMPTS = 4


@pytest.fixture(scope="module")
def api(embedded_server: ServerProcess) -> Any:
    """The description, without the routes that start and stop things."""
    schema = schemathesis.openapi.from_url(f"{embedded_server.url}/openapi.json")
    return schema.include(path_regex=PATHS)


def test_nothing_is_a_server_error(api: Any) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) >= 7
    for operation in operations:
        try_out(operation)


def try_out(operation: Any) -> None:
    """Call one route with whatever its description allows."""

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def call(case: Any) -> None:
        keep_small(case.body)
        answer = case.call(timeout=PATIENCE_S)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error"}, answer.text

    call()


def keep_small(body: Any) -> None:
    """Bound the work that a valid body asks for; its other fields stay as they are."""
    if not isinstance(body, dict):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body or name == "max_tokens":
            value = body.get(name)
            if value is None or (isinstance(value, int) and value > MAX_TOKENS):
                body[name] = MAX_TOKENS
    if isinstance(body.get("n"), int) and body["n"] > MAX_PROMPTS:
        body["n"] = MAX_PROMPTS


def test_the_description_is_complete(embedded_server: ServerProcess, api: Any) -> None:
    paths = api.raw_schema["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        operation = paths[path]["post"]
        assert "$ref" in str(operation["requestBody"])
        assert {"200", "400", "404", "415", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
