"""The load generator: `isinglass bench serve`, against any OpenAI-compatible server."""
