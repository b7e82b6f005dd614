"""A first look at every host of a large fleet: of which of them nothing needs to be told but that all of it passes?

The rules are those of the judge, and it is the judge's own functions that are asked. What makes it fast is that hosts of a
fleet are alike: what thousands of them say in the same words is judged once (`Reader` gives equal metrics as one object), and
which observation is held against which limit is found out once for hosts that made the same observations; then only the
numbers are compared. What needs the whole fleet, medians and majorities, is put aside as claims and settled at the end.

Nothing is decided here against a host: whoever does not plainly pass is flagged, and judged in full.
"""

from fleet.judge.survey.benchmarks import kinds_of
from fleet.judge.survey.found import Looked
from fleet.judge.survey.survey import Survey

__all__ = ["Looked", "Survey", "kinds_of"]
