"""Find what changed between two states of the same hosts: parts, versions, and figures beyond their noise.

This package reads and writes no files. A figure that changed by more than its noise counts as regressed or improved in two cases:
a criterion with `vs_baseline` matches it, or it is a reading of a link or of wear (`fleet.judge.baseline.READINGS`). The noise is
the share that the criterion allows, or a multiple of the figure's standard deviation if this multiple is larger. If the multiple
is used and exceeds a quarter of the figure, the change is unclear. The noise of a reading of a link or of wear that no such
criterion matches is 0. Each changed figure states its noise. Other figures are listed without a judgement if they changed by more
than a quarter, and by more than four standard deviations.
"""
