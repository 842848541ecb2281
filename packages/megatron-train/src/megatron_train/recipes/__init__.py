"""Recipes: settings of whole runs, shipped with the package; each is a YAML file in this folder."""
