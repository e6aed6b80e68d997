"""What operators ask: health, metrics, debugging, control."""
