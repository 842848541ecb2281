"""Both ends of a model: embeddings of tokens and positions, and the output layer."""
