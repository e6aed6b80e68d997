"""Layer 1: entry points. The only layer that chooses the sinks of observability."""
