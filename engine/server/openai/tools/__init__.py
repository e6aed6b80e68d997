"""Tools: which a request offers, how a model calls them, and what of its text is a call."""
