"""Find what changed between two states of the same hosts: parts, versions, and figures beyond their noise.

This package reads and writes no files. Every changed figure states its noise. How the noise is determined depends on the figure:

- If a criterion with `vs_baseline` matches the figure, the noise is the larger of two values: the change that the criterion
  allows, and a multiple of the figure's standard deviation. A change beyond the noise is regressed or improved. But if the
  multiple is the larger value and exceeds a quarter of the figure, the change is unclear.
- Readings of a link and of wear (`fleet.judge.baseline.READINGS`) have no noise if no such criterion matches them. Every change
  is regressed or improved.
- Any other figure is listed without a judgement if it changed by more than a quarter, and by more than four standard deviations.
"""
