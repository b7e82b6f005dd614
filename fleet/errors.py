"""What the control node's functions raise. `cli` turns them into a message on stderr and an exit code."""


class UsageError(Exception):
    """The operator's input is wrong: the message names the value, the cause and the remedy. Exit code 64."""


class RunError(Exception):
    """A run directory cannot be used: absent, incomplete, held by somebody else. Exit code 2."""
