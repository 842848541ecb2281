"""Families of published decoder-only models."""
