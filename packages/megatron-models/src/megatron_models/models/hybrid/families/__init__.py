"""Families of hybrid models."""
