"""Drawing from a law, and turning a draw from one law into a draw from another while changing it as rarely as possible."""

from ..kernels.coupling import couple, couple_window, draw


__all__ = ["couple", "couple_window", "draw"]
