"""What is not as it was: parts, versions, and figures beyond their noise. A pure function of two sights of the same hosts.

A figure counts as regressed or improved where a criterion with `vs_baseline` speaks of it: the share that it allows, or the
figure's own noise from run to run where that is larger, is what is taken for noise, and each change states it. Other figures are
told where they moved far, without a judgement.
"""
