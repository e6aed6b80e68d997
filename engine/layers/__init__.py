"""Building blocks of the models: linear maps, norms, embeddings, rotary positions."""
