"""What a user did wrong, for one line on the terminal."""


class ConversionError(ValueError):
    """A checkpoint can not be converted."""
