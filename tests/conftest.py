import gc
import os


# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402


# Tiny models gain nothing from more threads.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_finish():
    """Garbage collection, of which every capture of a graph needs one, skips the modules and the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_fast_bfloat16():
    """Commands load float32 on every CPU, so that the images of a test do not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
            patch.setattr(torch.cpu, name, lambda: False)
        yield


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    """Step times of tiny models stay out of the user's cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Every device that a test should hold on; the GPU's share runs with `-m gpu`."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    return request.param
