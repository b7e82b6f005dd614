"""Scaling studies: which cells a study has, which is measured next, and what came of them."""
