"""The constants of the random numbers, as unsigned words of 64 bits."""

_MULTIPLIER = 0xD1342543DE82EF95

POSITION, STEP, BLOCK, PURPOSE, SEED = (pow(_MULTIPLIER, power, 1 << 64) for power in range(1, 6))
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(word: int) -> int:
    """The same 64 bits as an int64."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def key_of(purpose: int) -> int:
    """The key of a purpose, as an int64."""
    return signed((purpose + 1) * PURPOSE)
