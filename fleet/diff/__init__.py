"""Find what changed between two states of the same hosts: parts, versions, and figures beyond their noise. Pure.

A figure counts as regressed or improved if a criterion with `vs_baseline` matches it. Noise is the share that the criterion
allows, or the figure's own spread from run to run if that is larger; each change states it. Other figures are listed, without a
judgement, if they changed a lot.
"""
