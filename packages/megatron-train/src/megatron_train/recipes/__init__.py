"""Recipes: settings of whole runs. Each is a YAML file in this folder."""
