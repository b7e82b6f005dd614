"""Baselines on the control node: accepting a run into one, comparing with one, and judging an old run again."""
