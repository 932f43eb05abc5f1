"""Published weights of every family that do not fit are refused in one sentence, and leave nothing."""

import re
import shutil
from pathlib import Path

import published_layouts as layouts
import pytest
import torch
from convert import test_published as published
from convert.test_published import MODELS, half_written
from pipelines.chameleon.published import chameleon_tokenizer
from safetensors.torch import load_file, save_file

from arimage import AutoPipeline
from arimage.published.registry import find_published


hub, publish = published.hub, published.publish
WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def change_weights(path: Path, change: str) -> None:
    """Remove or cut the largest tensor of a published file, or add one."""
    whole = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    tables = [whole]
    for table in tables:
        tables += [it for it in table.values() if isinstance(it, dict)]
    sizes = {key: it.numel() for table in tables for key, it in table.items() if isinstance(it, torch.Tensor)}
    # The head is not read.
    used = [key for key in sizes if key.endswith("weight") and key != "llm_model.lm_head.weight"]
    key = max(used, key=sizes.get)
    for table in [table for table in tables if key in table]:
        value = table.pop(key) if change != "unexpected" else torch.ones(2, 2)
        if change != "missing":
            table["strange.weight" if change == "unexpected" else key] = value[:, :-1].clone()
    save_file(whole, path, {"format": "pt"}) if path.suffix == ".safetensors" else torch.save(whole, path)


# The first and the last layout of each pipeline.
LAYOUTS = [{MODELS[name][2]: name for name in names}.values() for names in (MODELS, reversed(MODELS))]


@pytest.mark.every(8)
@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
@pytest.mark.parametrize("name", sorted({*LAYOUTS[0], *LAYOUTS[1]}))
def test_weights_that_do_not_fit_are_refused(name, change, publish, tmp_path):
    hub = publish(name)
    repositories = [folder for name, folder in hub.repositories.items() if name.partition("/")[0] != "source"]
    files = [path for folder in repositories for path in folder.rglob("*") if path.suffix in WEIGHTS]
    # One of the shards of a model.
    shard = re.compile(r"-\d+-of-\d+")
    files = {shard.sub("", str(path)): path for path in files if path.read_bytes() != layouts.UNUSED}.values()
    assert files
    for path in files:
        content = path.read_bytes()
        change_weights(path, change)
        if find_published(name).requested:
            chameleon_tokenizer(tmp_path / "home" / "arimage" / "chameleon-tokenizer")
        with pytest.raises(ValueError) as refusal:
            AutoPipeline.from_pretrained(name)
        said = {"missing": "has no|missing", "unexpected": "strange.weight", "shape": "shape|mismatched"}[change]
        assert re.search(rf"^/[^\n]*({said})[^\n]*$", str(refusal.value)) and not half_written(tmp_path)
        path.write_bytes(content)
        shutil.rmtree(tmp_path / "home")
