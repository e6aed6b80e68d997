"""OpenAI's API: bodies to requests of the engine, outputs to answers."""
