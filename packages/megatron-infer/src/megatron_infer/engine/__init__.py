"""The generation engine: batches, their cache, and text in and out."""
