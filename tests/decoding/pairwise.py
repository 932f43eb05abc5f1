"""Choices of settings that try every pair of values, which is what it takes to meet most faults (all-pairs
testing)."""

import itertools


def pairwise(settings, valid=lambda choice: True):
    """Some of the products of `settings`, a dict of lists, such that every two values of different settings meet in
    one.

    Greedy: each choice is the one with the most pairs that did not meet yet. `valid(choice)` leaves products out.
    """
    choices = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    pairs_of = [_pairs(choice) for choice in choices if valid(choice)]
    choices = [choice for choice in choices if valid(choice)]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(choices)), key=lambda i: len(pairs_of[i] & missing))
        missing -= pairs_of[best]
        chosen.append(choices[best])
    return chosen


def each_once(settings, valid=lambda choice: True):
    """The choices of `pairwise` that have a value which no choice before has: few, and unlike each other."""
    met, chosen = set(), []
    for choice in pairwise(settings, valid):
        values = {(name, repr(value)) for name, value in choice.items()}
        if values - met:
            met |= values
            chosen.append(choice)
    return chosen


def _pairs(choice):
    """The pairs of values in a choice; a setting alone where it is the only one."""
    items = [(name, repr(value)) for name, value in choice.items()]
    return set(itertools.combinations(items, 2)) or {tuple(items)}
