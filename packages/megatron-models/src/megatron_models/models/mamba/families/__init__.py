"""Families of models of Mamba-2 layers."""
