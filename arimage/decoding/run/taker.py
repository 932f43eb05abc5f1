"""What takes the steps of a state."""

from collections.abc import Callable

from ..contract.state import DecodingState


Step = Callable[[DecodingState], None]


class StepTaker:
    """Takes the steps of one state, by calling a function.

    Attributes:
        nbytes: the memory that it keeps between steps.
        replays: how many steps were replayed from CUDA graphs.
        uncaptured: how many shapes of steps have not come often enough to be captured.
        failed: whether a capture has failed.
    """

    nbytes = replays = uncaptured = 0
    failed = False

    def __init__(self, step: Step):
        self._step = step

    def __call__(self, state: DecodingState) -> None:
        self._step(state)
