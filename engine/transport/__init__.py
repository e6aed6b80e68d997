"""Layer 3: the boundary between the caller's process and the engine core's."""
