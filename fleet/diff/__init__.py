"""Find what changed between two states of the same hosts: parts, versions, and figures beyond their noise.

This package reads and writes no files. A figure counts as regressed or improved if a criterion with `vs_baseline` matches it, or
if it is a reading of a link or of wear. Noise is the share that the criterion allows, or a multiple of the spread of the figure
between runs if that is larger; if that is too large, the change is unclear. Each change states its noise. Other figures are
listed without a judgement if they changed by more than a quarter, and by more than four standard deviations.
"""
