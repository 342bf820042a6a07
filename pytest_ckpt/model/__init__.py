"""Geometries of real models, and the training state made from them."""
