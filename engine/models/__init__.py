"""Model classes, their registry and loader; they know layers and weights, not requests."""
