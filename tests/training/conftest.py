import pytest

from arimage.training import loop


@pytest.fixture(autouse=True, scope="session")
def no_plots():
    """The curve of a tiny run costs more than its training; the one test that asks for it gets what plots it."""
    with pytest.MonkeyPatch.context() as patch:
        plot = loop.plot_log
        patch.setattr(loop, "plot_log", lambda log, path: None)
        yield plot
