import pytest


@pytest.fixture(autouse=True, scope="module")
def checked_graphs():
    """Every third replay is compared with an eager step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARIMAGE_CHECK_GRAPHS", "3")
        yield
