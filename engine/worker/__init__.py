"""Layer 6: runs the steps. Owns weights, KV tensors and the persistent batch; plans nothing."""
