"""Layer 5: reaches the worker or workers. Knows no request and no tensor."""
