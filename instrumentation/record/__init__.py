"""From the engine's calls to records: spans, rings, the drain, the journal."""
