"""Layer 4: the engine core. Decides what runs in each step; knows no tensor and no text."""
