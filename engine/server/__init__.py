"""The OpenAI-compatible server: HTTP in, `AsyncLLM` behind it."""
