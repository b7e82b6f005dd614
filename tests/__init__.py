"""Tests. The folders of `tests/unit` mirror those of the tested code."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Root directory of the checkout."""
