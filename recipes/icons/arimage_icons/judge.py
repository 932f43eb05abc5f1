"""`python -m arimage_icons.judge`: trains the judge of concepts, and prints how well it knows real icons that it never
saw, next to its verdict on generated ones."""

import argparse
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

from arimage import PatchVQModel
from arimage.cli.options import choose_device
from arimage.eval.job import Job
from arimage.eval.report import markdown_table
from arimage.media.files import open_image, to_rgb
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.processes import batch_generator
from arimage.training.recipe import load_augmentation
from arimage.training.resuming import digest, of_settings

from . import JUDGE, MODELS, RECIPES
from .judge_network import COMMON, IconJudge, concepts_of, verdicts


# The splits that training does not see: other designs of the same sets, and sets that are held out.
HELD_OUT = ("val", "test")


@dataclass(frozen=True)
class Icons:
    """Pictures uint8 [N, H, W] in grey, and the caption of each."""

    pixels: torch.Tensor
    captions: list[str]


def read_icons(path: Path) -> Icons:
    """The icons of a parquet file with the columns `image` and `caption`."""
    table = pq.read_table(path, columns=["image", "caption"]).to_pydict()
    where = f"a picture of {path}"
    images = [to_rgb(where, open_image(where, io.BytesIO(file["bytes"]))) for file in table["image"]]
    return Icons(torch.from_numpy(np.stack([np.asarray(image.convert("L")) for image in images])), table["caption"])


def tokenizer_of_icons() -> PatchVQModel:
    return PatchVQModel.from_pretrained(MODELS / "icons-arpg", subfolder="vq").eval()


@torch.no_grad()
def through(vq: PatchVQModel, pixels: torch.Tensor) -> torch.Tensor:
    """Pictures [N, H, W] from 0 to 255 as the tokenizer gives them back."""
    images = [(part.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1) for part in pixels.split(1024)]
    return torch.cat([(vq.decode(vq.encode(part))[:, 0].clamp(-1, 1) + 1) * 127.5 for part in images])


@dataclass(frozen=True)
class JudgeSettings:
    """How the judge is trained: on pictures shifted, scaled and mirrored as those of the models are, half of them as
    the tokenizer gives them back."""

    optimizer: OptimizerSettings = OptimizerSettings(
        steps=1400, learning_rate=4e-3, weight_decay=0.05, ema_decay=0.99, warmup_steps=200, final_share=0.0
    )
    batch_size: int = 128
    label_smoothing: float = 0.1
    seed: int = 0


class JudgeTask(nn.Module):
    def __init__(self, model: IconJudge, train: Icons, held_out: dict[str, Icons], settings: JudgeSettings):
        super().__init__()
        self.model, self.settings = model, settings
        self.icons, self.held_out = train, held_out
        # In a tuple, since it is not part of what is trained.
        self.tokenizers = (tokenizer_of_icons(),)
        self.labels = torch.tensor([model.config.concepts.index(caption) for caption in train.captions])
        changes = load_augmentation(RECIPES / "icons-patches.toml")
        # The second copy is the one that is changed.
        self.changes = replace(changes, copies=2)

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        generator, count = batch_generator(self.settings.seed, step), self.settings.batch_size
        index = torch.randint(len(self.labels), (count,), generator=generator)
        pixels = torch.stack([self.changed(number, step * count + i) for i, number in enumerate(index.tolist())])
        pixels[: count // 2] = through(self.tokenizers[0], pixels[: count // 2])
        device = self.model.device
        labels = self.labels[index].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = self.model(pixels.to(device)).float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.settings.label_smoothing)
        return loss, {"loss": loss.detach(), "accuracy": (logits.argmax(-1) == labels).float().mean()}

    def changed(self, number: int, seed: int) -> torch.Tensor:
        """The icon with this number [H, W], changed at random."""
        frames = self.icons.pixels[number].expand(1, 3, -1, -1)
        may_mirror = self.changes.may_mirror([self.icons.captions[number]])
        return self.changes.copies_of(frames, may_mirror, seed)[1, 0, 0].float()

    def report(self, step: int, out: Path) -> dict[str, float]:
        figures = real_figures(self.model, self.tokenizers[0], self.held_out)
        return {f"{name}, all": row["all"]["right"] for name, row in figures.items()}


def accuracy(model: IconJudge, pixels: torch.Tensor, captions: Sequence[str]) -> dict[str, dict]:
    """How many pictures there are of the commonest concepts, and of all; and the shares of those whose likeliest
    concept is right, and one of whose five likeliest is."""
    concepts = torch.tensor(concepts_of(captions, model.config.concepts))
    hits = verdicts(model, pixels, concepts.tolist())
    found = {}
    for name, some in (("common", hits[concepts < COMMON]), ("all", hits)):
        right, near = some[:, 0].double().mean(), some.any(1).double().mean()
        found[name] = {"count": len(some), "right": round(float(right), 4), "top-5": round(float(near), 4)}
    return found


def real_figures(model: IconJudge, vq: PatchVQModel, splits: dict[str, Icons]) -> dict[str, dict]:
    """The `accuracy` on real icons, as they are and as the tokenizer gives them back."""
    found = {}
    for name, icons in splits.items():
        found[name] = accuracy(model, icons.pixels, icons.captions)
        found[f"{name}, from tokens"] = accuracy(model, through(vq, icons.pixels), icons.captions)
    return found


def train_judge(data: Path, out: Path, device: str, settings: JudgeSettings = JudgeSettings()) -> IconJudge:
    """Train on `data`/train.parquet, and write the judge in float16 with its figures of val.parquet and test.parquet
    to `out`/icons-judge. A second call resumes an interrupted one."""
    train, held_out = read_icons(data / "train.parquet"), read_held_out(data)
    concepts = [name for name, _ in Counter(train.captions).most_common()]
    torch.manual_seed(settings.seed)
    model = IconJudge(concepts)
    nn.Module.to(model, device, memory_format=torch.channels_last)
    task = JudgeTask(model, train, held_out, settings)
    fit(task, settings.optimizer, out, about={**of_settings(settings), "data": digest(train.captions)})
    nn.Module.to(model, "cpu", torch.float16, memory_format=torch.contiguous_format)
    model.save_pretrained(out / JUDGE.name)
    model = IconJudge.from_pretrained(out / JUDGE.name).eval()
    figures = real_figures(model, task.tokenizers[0], held_out)
    (out / JUDGE.name / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return model


def read_held_out(data: Path) -> dict[str, Icons]:
    return {split: read_icons(data / f"{split}.parquet") for split in HELD_OUT}


def compare(judge: Path, data: Path, runs: list[Path]) -> str:
    """A table of the `accuracy` on real icons and on the images of runs of `arimage eval generate`."""
    model = IconJudge.from_pretrained(judge).eval()
    rows = real_figures(model, tokenizer_of_icons(), read_held_out(data))
    for run in runs:
        job = Job(run)
        pixels = torch.from_numpy(job.small_versions).float().mean(1)
        rows[run.name] = accuracy(model, pixels, [row["prompt"] for row in job.rows])
    shares = ["right", "in the five likeliest"]
    head = ["pictures", f"of the {COMMON} commonest names", *shares, "of all", *shares]
    cells = [
        [name, *(text for part in row.values() for text in (f"{part['count']:,}", part["right"], part["top-5"]))]
        for name, row in rows.items()
    ]
    return "\n".join(markdown_table(head, [[str(cell) for cell in line] for line in cells]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training, scoring = (commands.add_parser(name) for name in ("train", "score"))
    for command in (training, scoring):
        command.add_argument("--data", type=Path, required=True, help="folder with train, val and test.parquet")
    training.add_argument("--out", type=Path, required=True, help="folder of the run; its icons-judge is the judge")
    training.add_argument("--device", help="default: a GPU if there is one")
    scoring.add_argument("runs", type=Path, nargs="*", help="folders of `arimage eval generate`")
    scoring.add_argument("--judge", type=Path, default=JUDGE, help="default: the packaged one")
    given = parser.parse_args()
    if given.command == "train":
        train_judge(given.data, given.out, choose_device(given.device))
    else:
        print(compare(given.judge, given.data, given.runs))
