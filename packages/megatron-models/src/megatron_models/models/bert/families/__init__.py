"""Families of encoders."""
