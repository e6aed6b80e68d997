"""Finding and reading checkpoints without torch: files, configuration, GGUF headers."""
