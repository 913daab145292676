"""The two ways in which a command ends badly on purpose; the command line maps them to exit codes."""


class UserError(ValueError):
    """The recipe, the data or the usage is wrong: exit code 2. The message names the place, the value and the fix."""


class RunFailed(RuntimeError):
    """The run itself failed (NaN loss, out of memory, a plan that doesn't fit): exit code 1."""
