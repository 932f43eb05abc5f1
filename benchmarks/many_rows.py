"""A data set of many rows, tiny pictures that are made on the spot, through `arimage train tokens` and one epoch of
batches: seconds and the most memory of all processes per 100,000 rows. Then a batch of 256 rows, next to one indexing
of a memory map of the same rows.

python benchmarks/many_rows.py --rows 1300000 [--tokens]
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from arimage.tokenizers.vq_patches import PatchVQModel
from arimage.training.tokens.batches import TokenBatches
from arimage.training.tokens.cache import INDEX, Index, Shard, TokenCache
from arimage.training.tokens.heldout import hold_out


PER_FILE, WINDOW, BATCH = 20_000, 100_000, 256


def make_data(folder: Path, rows: int, side: int, files: bool) -> None:
    """Pictures of noise in ten classes: parquet shards, or folders of `files`."""
    numbers = np.random.default_rng(0)

    def picture() -> bytes:
        file = io.BytesIO()
        Image.fromarray(numbers.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "BMP")
        return file.getvalue()

    for start in range(0, rows, PER_FILE):
        count = min(PER_FILE, rows - start)
        if files:
            for number in range(start, start + count):
                path = folder / f"class-{number % 10}" / f"{number // 10_000}" / f"{number}.bmp"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(picture())
        else:
            images = [{"bytes": picture(), "path": None} for _ in range(count)]
            table = pa.table({"image": images, "label": [number % 10 for number in range(count)]})
            pq.write_table(table, folder / f"{start:08d}.parquet", row_group_size=1000)


def memory_of(process: psutil.Process) -> tuple[int, int]:
    """Kilobytes of a process, a share of what it shares: its own memory, and pages of files that are mapped, which
    Linux takes back where memory is short."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        # It has ended.
        return 0, 0
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return found["Pss_Anon"] + found["Pss_Shmem"], found["Pss_File"]


class Watch:
    """Prints the rows, the seconds and the most memory of a process and its children since the line before."""

    def __init__(self, name: str, process: psutil.Process, rows: int):
        self.name, self.process, self.rows = name, process, rows
        self.began, self.most, self.next = time.monotonic(), (0, 0), WINDOW

    def look(self, done: int) -> None:
        # A process that has ended has no children.
        family = [self.process, *(self.process.children(True) if self.process.is_running() else ())]
        own, mapped = map(sum, zip(*map(memory_of, family), strict=True))
        self.most = max(self.most, (own, mapped))
        if done >= min(self.next, self.rows):
            seconds = time.monotonic() - self.began
            own, mapped = (value / 1e3 for value in self.most)
            memory = f"{own:.0f} MB, and {mapped:.0f} MB of files that are mapped"
            print(f"{self.name}: {done:,} rows, {seconds:.0f} s, {memory}", flush=True)
            self.most, self.next = (0, 0), self.next + WINDOW


def encode(data: Path, tokenizer: Path, out: Path, rows: int, side: int) -> None:
    options = {"data": data, "model": tokenizer, "size": side, "batch-size": BATCH, "out": out}
    command = ["train", "tokens", *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen([sys.executable, "-m", "arimage", *command]) as run:
        watch = Watch("train tokens", psutil.Process(run.pid), rows)
        while run.poll() is None:
            watch.look(1024 * len(list(out.glob("tokens-*.safetensors"))))
            time.sleep(0.5)
    if run.returncode:
        raise SystemExit(run.returncode)
    watch.look(rows)


def make_tokens(folder: Path, rows: int) -> None:
    """A cache of random tokens, 256 per row, as `train tokens` writes it."""
    folder.mkdir()
    about = {"model": "none", "vq": "none", "image_size": [16, 16], "views": "centre", "data": "noise"}
    about |= {"columns": ["image", "label"], "limit": None, "shard_size": 1024}
    shards = []
    for number, start in enumerate(range(0, rows, 1024)):
        count, file = min(1024, rows - start), f"tokens-{number:05d}.safetensors"
        tokens = torch.randint(0, 16384, (count, 1, 256)).to(torch.uint16)
        save_file({"tokens": tokens, "labels": torch.randint(0, 10, (count,))}, folder / file)
        shards.append(Shard(file, count, hashlib.sha256((folder / file).read_bytes()).hexdigest()))
    index = Index(about, (256,), True, 10, None, [1.0], rows, True, shards)
    (folder / INDEX).write_text(json.dumps(asdict(index)))


def epoch(folder: Path, workers: int) -> None:
    cache, _ = hold_out(TokenCache(folder))
    batches = TokenBatches(cache, BATCH, 0.1, 0)
    watch = Watch("one epoch", psutil.Process(), len(cache) // BATCH * BATCH)
    for number, _ in enumerate(batches.from_step(0, len(cache) // BATCH, workers), 1):
        if number % 20 == 0 or number * BATCH >= watch.rows:
            watch.look(number * BATCH)


def compare(folder: Path) -> None:
    """A batch of tokens and classes next to the tokens alone from one file that is mapped."""
    cache, one = TokenCache(folder), folder / "one.npy"
    shape = (len(cache), *cache.index.shape)
    whole = np.lib.format.open_memmap(one, "w+", cache._shard(0).tokens.dtype, shape)
    for number, shard in enumerate(cache.index.shards):
        first = sum(other.count for other in cache.index.shards[:number])
        whole[first : first + shard.count] = cache._shard(number).tokens[:, 0]
    chosen = [np.random.default_rng(number).integers(0, len(cache), BATCH).tolist() for number in range(200)]
    mapped = np.load(one, mmap_mode="r")

    def milliseconds(read: Callable[[list[int]], object], images: list[int]) -> float:
        began = time.perf_counter()
        read(images)
        return (time.perf_counter() - began) * 1e3

    both = (
        lambda images: cache.read(images, [0] * BATCH),
        lambda images: torch.from_numpy(mapped[images].astype(np.int64)),
    )
    # In turn, each batch twice, since the first time reads from the disk.
    found = np.array([[milliseconds(read, images) for read in both] for images in chosen * 2])
    ours, theirs = np.median(found[len(chosen) :], axis=0)
    print(f"a batch of {BATCH} rows: {ours:.3f} ms, one indexing of a memory map: {theirs:.3f} ms")
    one.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=16, help="pixels; one token per pixel")
    parser.add_argument("--files", action="store_true", help="folders of files in place of parquet shards")
    parser.add_argument("--tokens", action="store_true", help="random tokens in place of encoded pictures")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, tokenizer, out = (Path(folder) / name for name in ("data", "tokenizer", "tokens"))
        torch.manual_seed(0)
        if args.tokens:
            make_tokens(out, args.rows)
        else:
            data.mkdir()
            PatchVQModel(patch_size=1, codebook_size=300).save_pretrained(tokenizer)
            make_data(data, args.rows, args.side, args.files)
            encode(data, tokenizer, out, args.rows, args.side)
        epoch(out, args.workers)
        compare(out)


if __name__ == "__main__":
    main()
