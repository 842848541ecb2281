"""Maximal update parametrization: initial weights, factors and learning rates by width."""
