"""Reasoning: which part of a model's text it thought before it answered."""
