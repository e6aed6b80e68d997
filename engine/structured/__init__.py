"""Outputs of a given form: what users say of it, grammars, matchers, masks."""
