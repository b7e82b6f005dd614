"""Tests; `tests/unit` has the same folders as the code that they test."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
