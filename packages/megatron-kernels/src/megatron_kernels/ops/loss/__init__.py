"""Losses per token."""
