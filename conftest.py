"""What the tests of arimage and of recipes share."""

import gc
import json
import os
from collections import Counter, defaultdict


# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from arimage.eval.runs.files import to_lines  # noqa: E402
from arimage.eval.runs.run_folder import manifest_digest  # noqa: E402


# Tiny models gain nothing from more threads.
torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collecting leaves no garbage but many objects. Garbage collection, of which every capture of a graph needs one,
    skips them: the modules and the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave all but one in n cases of a test, `@pytest.mark.every(n)`, to the slow tests. Those that stay share as few
    values of parameters as they can."""
    tests = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None and not item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
            tests[item.nodeid.partition("[")[0], *mark.args].append(item)
    for (_, n), cases in tests.items():
        uses = Counter()
        for _ in range(-(-len(cases) // n)):
            case = min(cases, key=lambda case: sum(uses[value] for value in _values(case)))
            cases.remove(case)
            uses.update(_values(case))
        for case in cases:
            case.add_marker(pytest.mark.slow)


def _values(case) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in case.callspec.params.items()]


@pytest.fixture(autouse=True, scope="session")
def no_fast_bfloat16():
    """Commands load float32 on every CPU, so that the images of a test do not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
            patch.setattr(torch.cpu, name, lambda: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Step times of tiny models stay out of the user's cache. Not by `monkeypatch`, which would then be undone after
    the fixtures of a module whose patches it covers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Every device that a test should hold on; the GPU's share runs with `-m gpu`."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    return request.param


@pytest.fixture
def write_run():
    """Write a finished run of given rows and images, uint8 [N, H, W, 3], or videos, [N, T, H, W, 3]."""

    def write_run(folder, rows, images):
        (folder / "images").mkdir(parents=True, exist_ok=True)
        (folder / "results").mkdir(exist_ok=True)
        for row, image in zip(rows, images, strict=True):
            array = np.asarray(image)
            first, *others = map(Image.fromarray, array if array.ndim == 4 else [array])
            first.save(folder / row["path"], **({"save_all": True, "append_images": others} if others else {}))
        config = {
            "model": "tiny",
            "weights": "0",
            "decoding_name": "ar",
            "decoding": {},
            "sampling": {},
            "source": {},
            "manifest": manifest_digest(rows),
            "images": len(rows),
            "seed": 0,
            "batch_size": 1,
            "dtype": "float32",
            "machine": {"device": "cpu", "threads": 1, "torch": "2"},
        }
        result = {
            "batch_size": 1,
            "seconds": 1.0,
            "batch_passes": 1,
            "exact": True,
            "peak_memory": None,
            "warm": True,
            "passes": 1,
            "tokens_per_pass": 1.0,
        }
        results = [{"id": row["id"], "batch": row["id"], **result} for row in rows]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "manifest.jsonl").write_bytes(to_lines(rows))
        (folder / "results" / "rank-00000.jsonl").write_bytes(to_lines(results))

    return write_run
