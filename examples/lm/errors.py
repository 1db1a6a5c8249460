"""The one error that is shown to the user without a traceback."""


class UsageError(ValueError):
    """The options do not fit each other, the machine or the text."""
