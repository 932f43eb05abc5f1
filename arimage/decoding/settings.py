"""Checks that the settings of the decodings share."""


def check_settings(decoding, least: dict[str, int], choices: dict[str, tuple[str, ...]]) -> None:
    """Refuse settings that are not whole numbers of at least `least`, or not among `choices`."""
    for name, smallest in least.items():
        value = getattr(decoding, name)
        if not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} is {value!r}: give a whole number of at least {smallest}")
    for name, values in choices.items():
        if getattr(decoding, name) not in values:
            raise ValueError(f"{name} is {getattr(decoding, name)!r}: choose among {', '.join(values)}")
