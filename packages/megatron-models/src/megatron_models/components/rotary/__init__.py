"""Rotary positions: fields, the rotation of a layer, tables of cosines and sines."""
