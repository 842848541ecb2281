"""Parts of transformers, a folder each: configuration, description and module."""
