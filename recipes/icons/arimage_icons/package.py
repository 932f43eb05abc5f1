"""`python -m arimage_icons.package`: the folder of a packaged model from the pipeline that `arimage train model`,
`arimage train neighbours` or `arimage train drafter` wrote."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import torch

from arimage import (
    ARPGTransformer,
    AutoPipeline,
    HaltonMaskGITTransformer,
    LlamaGenTransformer,
    NeighbourModel,
    PatchVQModel,
    SpeculativeJacobiDecoding,
    WindowDrafter,
)
from arimage.training.saving import save_float16
from arimage_emoji.known import KnownCaptions

from .words import STYLES


EXAMPLES = ["a filled heart", "an outlined camera", "trophy", "a bold arrow left", "gift", "a thin bell"]
# For models of neighbours and drafters of windows.
CORRECTIONS = 4
PATTERNS = ["{style} {picture}", "{style} {style} {picture}", "{picture} icon", "{style} {picture} icon"]
# Of models that know words of other names too.
WORDS = ["{word}", "{word} {word}", "{style} {word}", "{style} {word} {word}"]


def known(names: Iterable[str], words: Iterable[str]) -> KnownCaptions:
    """What a model knows that was trained on icons with these names and with all `words`."""
    pictures, places, patterns = {name: [] for name in sorted(set(names))}, {"style": [*STYLES]}, [*PATTERNS]
    if set(words) - {word for name in pictures for word in name.split()}:
        places["word"] = sorted(words)
        patterns += WORDS
    return KnownCaptions(pictures, places, patterns, examples=[*EXAMPLES])


def name_modules(folder: Path) -> None:
    """Let the index of a saved pipeline name modules of arimage, in place of files with one import, which a package
    does without."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    classes = [
        ARPGTransformer,
        HaltonMaskGITTransformer,
        LlamaGenTransformer,
        NeighbourModel,
        PatchVQModel,
        WindowDrafter,
    ]
    modules = {kind.__name__: kind.__module__ for kind in classes}
    index["_class_name"] = index["_class_name"][1]
    for name, entry in list(index.items()):
        if entry == [None, None]:
            del index[name]
        elif isinstance(entry, list) and entry[1] in modules:
            index[name] = [modules[entry[1]], entry[1]]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file in folder.rglob("*.py"):
        file.unlink()
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)


def package(source: Path, out: Path, data: Path) -> None:
    """Write the folder `out` from the folder of a pipeline, which knows the names in train.parquet of `data`."""
    pipe = AutoPipeline.from_pretrained(source, dtype=torch.float32)
    names = pq.read_table(data / "train.parquet", columns=["caption"])["caption"].to_pylist()
    words = pipe.tokenizer.get_vocab().keys() - pipe.tokenizer.all_special_tokens - STYLES.keys()
    pipe.known_captions = known(names, words)
    if pipe.components.get("neighbours") is not None:
        assert isinstance(pipe.decoding, SpeculativeJacobiDecoding)
        pipe.decoding = replace(pipe.decoding, corrections=CORRECTIONS)
    with torch.no_grad():
        save_float16(pipe, out)
    name_modules(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="OUT/best of `arimage train model`, or OUT/model")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet")
    given = parser.parse_args()
    package(given.source, given.out, given.data)
