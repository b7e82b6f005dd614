"""How a record says that a host was left out of a run since others use it: both sides know the words."""

BUSY = "busy: "
"""The reason of each observation that was skipped for that begins so."""
