"""A server and a client: OpenAI's own, or anything else that speaks its API."""

import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

URL = "http://127.0.0.1:8123"
server = subprocess.Popen(
    [sys.executable, "-m", "engine.cli.main", "serve", "--port", "8123", "--log-level", "warning"]
)


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/health") as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503: still starting
        return False


try:
    while not is_ready():
        assert server.poll() is None, "the server did not start"
        time.sleep(0.1)
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is mica?"}],
            temperature=0,
            max_tokens=40,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
finally:
    server.terminate()  # lets running requests finish
    server.wait()
