"""`python -m arimage_icons.measure`: passes of a model, how much its seeds differ, and whether it copies."""

import argparse
import io
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torchvision.utils import save_image

from arimage import AutoPipeline
from arimage.decoding import decoding_from_name
from arimage.pipelines.base import ARImagePipeline


def read(path: Path) -> tuple[np.ndarray, list[str]]:
    """The pictures uint8 [N, H, W] of a file of the data set, and their names."""
    table = pq.read_table(path, columns=["image", "caption"]).to_pydict()
    pixels = [np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("L")) for image in table["image"]]
    return np.stack(pixels), table["caption"]


def ink(pixels: torch.Tensor) -> torch.Tensor:
    """Grey pixels uint8 [B, H, W] as images [B, 3, H, W] in [-1, 1]."""
    return (pixels.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)


def inks(images: torch.Tensor) -> torch.Tensor:
    """How dark each pixel is, [B, H * W] from 0 to 1, of images [B, 3, H, W] in [-1, 1]."""
    return (0.5 - images.mean(1).clamp(-1, 1) / 2).flatten(1)


def likeness(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The soft Jaccard index [A, B] of inks [A, D] and [B, D]: 1 for equal pictures."""
    shared = some @ others.T
    return shared / (some.square().sum(1)[:, None] + others.square().sum(1) - shared).clamp_min(1e-6)


def apart(pictures: torch.Tensor) -> float:
    """The mean difference per pixel of pictures [N, D], all pairs."""
    return float(
        torch.cdist(pictures, pictures, p=1).sum() / (len(pictures) * (len(pictures) - 1)) / pictures.shape[1]
    )


def compare(made: torch.Tensor, names: list[str], train: torch.Tensor, captions: list[str]) -> dict[str, float]:
    """Likeness of inks [N, D] to the training design that is nearest, and how often one of the five nearest has the
    name that the picture should have."""
    near = torch.cat([likeness(part, train).topk(5).values for part in made.split(256)])[:, 0]
    index = torch.cat([likeness(part, train).topk(5).indices for part in made.split(256)])
    right = [name in {captions[i] for i in its} for name, its in zip(names, index.tolist(), strict=True)]
    return {
        "nearest, median": round(float(near.median()), 3),
        "above 0.85": round(float((near > 0.85).float().mean()), 3),
        "above 0.95": round(float((near > 0.95).float().mean()), 3),
        "name among 5 nearest": round(sum(right) / len(right), 3),
    }


def passes(pipe: ARImagePipeline, prompts: list[str], windows: list[int]) -> dict[str, dict]:
    """Forward passes per image, and seconds per image one at a time, by decoding."""
    found = {}
    for name in ["ar", *(f"sjd-coupled:window={window}" for window in windows)]:
        label, _, window = name.partition(":window=")
        decoding = decoding_from_name(label, **({"window": int(window)} if window else {}))
        each, began = [], time.perf_counter()
        for seed, prompt in enumerate(prompts):
            generator = torch.Generator().manual_seed(seed)
            stats = pipe(prompt, decoding=decoding, generator=generator, output_type="pt").stats
            each.append(stats.forward_passes)
        seconds = (time.perf_counter() - began) / len(prompts)
        found[name] = {"passes": sum(each) / len(each), "seconds": round(seconds, 3), "exact": stats.exact}
    return found


def measure(model: str, data: Path, out: Path, prompts: int, seeds: int, windows: list[int]) -> dict:
    """The figures, which `out` receives with a sheet of the samples."""
    arrays, names = {}, {}
    for split in ("train", "val", "test"):
        arrays[split], names[split] = read(data / f"{split}.parquet")
    pipe = AutoPipeline.from_pretrained(model)
    vq = pipe.vq
    pipe.set_progress_bar_config(disable=True)
    common = [name for name, _ in Counter(names["train"]).most_common(300)]
    chosen = [common[i] for i in torch.randperm(300, generator=torch.Generator().manual_seed(0))[:prompts].tolist()]
    with torch.no_grad():

        def seen(pixels) -> torch.Tensor:
            """Pictures as the tokenizer gives them back, as what is compared must be."""
            parts = ink(torch.from_numpy(pixels)).split(1024)
            return torch.cat([inks(vq.decode(vq.encode(part))) for part in parts])

        train = seen(arrays["train"])
        wanted = [name for name in chosen for _ in range(seeds)]
        images = torch.cat(
            [
                pipe(part, generator=torch.Generator().manual_seed(i), output_type="pt").images
                for i, part in enumerate(wanted[start : start + 32] for start in range(0, len(wanted), 32))
            ]
        )
        made = inks(images * 2 - 1)
        by_prompt = made.view(prompts, seeds, -1)
        found = {
            "model": model,
            "passes": passes(pipe, chosen[:8], windows),
            "seeds apart": round(sum(map(apart, by_prompt)) / prompts, 4),
            "prompts apart": round(apart(by_prompt[:, 0]), 4),
            "made": compare(made, wanted, train, names["train"]),
        }
        for split in ("val", "test"):
            index = [i for i, name in enumerate(names[split]) if name in set(common)][:600]
            found[f"real {split}"] = compare(
                seen(arrays[split][index]), [names[split][i] for i in index], train, names["train"]
            )
    out.mkdir(parents=True, exist_ok=True)
    save_image(images, out / "sheet.png", nrow=seeds, pad_value=0.8)
    (out / "figures.json").write_text(json.dumps({"prompts": chosen, **found}, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a name or a folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with train, val and test.parquet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40, help="concepts, of the 300 commonest")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--windows", type=int, nargs="*", default=[16, 64, 256])
    given = parser.parse_args()
    print(json.dumps(measure(**vars(given)), indent=1))
