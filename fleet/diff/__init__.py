"""Find what changed between two states of the same hosts: parts, versions, and figures beyond their noise.

This package reads and writes no files. A figure counts as regressed or improved if a criterion with `vs_baseline` matches it.
Noise is the share that the criterion allows, or the spread of the figure between runs if that is larger. Each change states its
noise. Other figures are listed without a judgement if they changed by more than a quarter.
"""
