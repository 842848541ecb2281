"""Kinds of models, a folder each: configuration, module, families of published models."""
