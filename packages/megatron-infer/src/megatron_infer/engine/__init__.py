"""From prompts to continuations: the cache of a batch, its steps, and text in and out."""
