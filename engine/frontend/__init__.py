"""Requests in, results out, in the caller's process: text, validation, detokenization."""
