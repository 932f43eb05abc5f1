"""`python -m arimage_icons.train`: train a model of icons for some minutes, with all pictures on the device.

Writes NAME.jsonl (losses), NAME.safetensors (averaged weights in float16, the best by `val` so far) and NAME.png
(samples) into `--out`, the weights at every report.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

from arimage.decoding import order_of
from arimage.options import fast_dtype
from arimage.pipelines.arpg.transformer_arpg import ARPGTransformer
from arimage.pipelines.kinds.class_or_text import last_state, left_pad
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from arimage.training.loop import MasterWeights, OptimizerSettings

from .augment import augmented
from .data import Icons, load_packed
from .pack import ink
from .sheet import save_sheet
from .words import LENGTH, word_tokenizer


# The steps of a schedule, through which a run goes by the time that has passed.
STEPS = 10_000
OPTIMIZER = OptimizerSettings(
    steps=STEPS,
    learning_rate=3e-3,
    weight_decay=0.1,
    warmup_steps=STEPS // 50,
    schedule="linear",
    final_share=0.02,
    ema_decay=0.998,
    muon=("transformer.blocks.", "transformer.query_blocks.", "text_encoder.encoder.block."),
)
SLOW = {"text_encoder.": 0.5, "transformer.caption_projection.": 0.5}
# The share of captions with their words of style, and of pictures without a caption.
STYLED, UNCONDITIONAL = 0.6, 0.1
# Of an any-order model: the shares of farthest and of raster orders, the others are random; places that are also
# predicted as if they were the first; farthest orders to choose from.
FARTHEST, RASTER, FIRST_PLACES, ORDERS = 0.7, 0.1, 32, 2048
# The augmentation keeps its strength for this share of the time, and falls to a quarter until the end.
STRONG = 0.6
# Once the loss of `val` is so many nats above the best, the schedule goes by so many times as fast.
WORSE, HURRY = 0.5, 4.0

TEXT = {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 512, "num_layers": 2, "dropout_rate": 0.0}
WIDTH = {"hidden_size": 256, "intermediate_size": 704, "num_layers": 6, "num_attention_heads": 4}
# In raster order a model learns pictures by heart sooner.
MODELS = {
    "arpg": (
        ARPGTransformer,
        {
            "dropout": 0.1,
            "place_embeddings": True,
            "condition_copies": 10,
            "reads_words": True,
            "num_condition_tokens": LENGTH,
        },
    ),
    "llamagen": (LlamaGenTransformer, {"dropout": 0.2, "num_condition_tokens": 1}),
}


class IconModel(nn.Module):
    """A transformer and its text encoder.

    Args:
        kind: a name in `MODELS`.
        vocab_size, codes, grid_size: words, patches, and patches along each side of a picture.
        tiny: with layers for a test.
    """

    def __init__(self, kind: str, vocab_size: int, codes: int, grid_size: int, tiny: bool = False):
        super().__init__()
        build, own = MODELS[kind]
        self.kind = kind
        width = WIDTH | ({"hidden_size": 32, "intermediate_size": 64, "num_layers": 2} if tiny else {})
        given = {"conditioning": "text", "grid_size": grid_size, "vocab_size": codes, "caption_dim": TEXT["d_model"]}
        self.transformer = build(**given, **width, **own)
        self.transformer.init_weights()
        self.text_encoder = T5EncoderModel(T5Config(vocab_size=vocab_size, pad_token_id=0, eos_token_id=1, **TEXT))

    @property
    def any_order(self) -> bool:
        return self.kind == "arpg"

    def condition(self, text: torch.Tensor) -> dict[str, torch.Tensor]:
        """The prefix of captions with token ids [B, P], as the pipelines encode it."""
        mask = (text != 0).long()
        hidden = self.text_encoder(text, attention_mask=mask).last_hidden_state
        if self.transformer.config.num_condition_tokens == 1:
            hidden, mask = last_state(hidden, mask)
        hidden, mask = left_pad(hidden, mask)
        return {"prompt_embeds": hidden, "prompt_attention_mask": mask}

    def start_from_patches(self, codebook: torch.Tensor) -> None:
        """Let tokens with similar patches begin with similar embeddings."""
        weight = self.transformer.token_embedding.weight
        centred = codebook - codebook.mean(0)
        projected = centred @ torch.randn(codebook.shape[1], weight.shape[1])
        with torch.no_grad():
            weight.add_((0.03 * projected / projected.std()).to(weight))


def token_losses(
    transformer: nn.Module,
    tokens: torch.Tensor,
    unconditional: torch.Tensor,
    condition: dict[str, torch.Tensor],
    order: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy [B, N] of tokens [B, N] in `order` [B, N], followed by that of the `first` places [B, F]."""
    places = {} if order is None else {"order": order, "first_places": first}
    logits = transformer.predict(tokens, unconditional=unconditional, **places, **condition)
    if order is not None:
        tokens = tokens.gather(1, order if first is None else torch.cat([order, first], dim=1))
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")


class Trainer:
    """A run of one model.

    Args:
        model: on the device, in the dtype that it is trained in.
        vq, data: the image tokenizer and the splits, on the device.
        batch_size: pictures per step.
        compiled: whether to compile the forward and the backward pass of the transformer.
    """

    def __init__(
        self, model: IconModel, vq: nn.Module, data: dict[str, Icons], batch_size: int, compiled: bool, seed: int = 0
    ):
        self.model, self.vq, self.data, self.batch_size = model, vq, data, batch_size
        self.device = data["train"].pixels.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.weights = MasterWeights(model, OPTIMIZER, SLOW)
        self.losses: Callable = token_losses
        if compiled:
            self.losses = torch.compile(token_losses, dynamic=False)
        side = model.transformer.config.grid_size
        found = order_of("farthest", (side, side), torch.arange(ORDERS))
        assert found is not None
        self.farthest = found.to(self.device)
        # As many pictures of `train` as `val` has, from all sets, say how much is learned by heart.
        count = len(data["val"])
        index = torch.arange(count, device=self.device) * len(data["train"]) // count
        known = data["train"].pixels[index], data["train"].text[index]
        others = {split: (data[split].pixels, data[split].text) for split in ("val", "test")}
        with torch.no_grad():
            self.judged = {
                split: (self.encode(pixels), text[:, 1])
                for split, (pixels, text) in (others | {"train": known}).items()
            }
        self.left = torch.empty(0, dtype=torch.long, device=self.device)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """The tokens [B, N] of pixels [B, H, W] from 0 to 255."""
        return torch.cat([self.vq.encode(ink(part)).flatten(1) for part in pixels.split(4096)])

    def random(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator)

    def orders(self, count: int) -> torch.Tensor:
        """The places by rank [B, N] of `count` pictures."""
        places = self.farthest.shape[1]
        share = self.random(count, 1)
        found = self.farthest[(self.random(count) * len(self.farthest)).long()]
        found = torch.where(share < FARTHEST, found, self.random(count, places).argsort(1))
        return torch.where(share > 1 - RASTER, torch.arange(places, device=self.device), found)

    def batch(self, strength: float) -> tuple:
        """The arguments of `token_losses` after the transformer."""
        train = self.data["train"]
        while len(self.left) < self.batch_size:
            again = torch.randperm(len(train), device=self.device, generator=self.generator)
            self.left = torch.cat([self.left, again])
        index, self.left = self.left[: self.batch_size], self.left[self.batch_size :]
        with torch.no_grad():
            tokens = self.encode(augmented(train.pixels[index], train.may_mirror[index], strength, self.generator))
        styled = (self.random(len(index)) < STYLED).long()
        condition = self.model.condition(train.text[index, styled])
        given = tokens, self.random(len(index)) < UNCONDITIONAL, condition
        if not self.model.any_order:
            return given
        first = (self.random(len(index), FIRST_PLACES) * tokens.shape[1]).long()
        return *given, self.orders(len(index)), first

    def step(self, done: float) -> torch.Tensor:
        """Train on a batch after the share `done` of the time; the mean loss of a token."""
        strength = min(1.0, 1 - 0.75 * (done - STRONG) / (1 - STRONG))
        loss = self.losses(self.model.transformer, *self.batch(strength)).mean()
        loss.backward()
        self.weights.step(min(int(done * STEPS), STEPS - 1))
        return loss.detach()

    @torch.no_grad()
    def heldout(self, split: str, raster: bool = False) -> float:
        """Nats per picture of a split under the weights in the model, with captions that name the style."""
        total, (tokens, text) = 0.0, self.judged[split]
        for start in range(0, len(tokens), 512):
            part = tokens[start : start + 512]
            condition = self.model.condition(text[start : start + 512])
            order = None
            if self.model.any_order and not raster:
                order = self.farthest[torch.arange(start, start + len(part), device=self.device) % ORDERS]
            always = torch.zeros(len(part), dtype=torch.bool, device=self.device)
            total += float(token_losses(self.model.transformer, part, always, condition, order).sum())
        return total / len(tokens)

    def report(self) -> dict[str, float]:
        """Nats per picture of the averaged weights, which stay in the model."""
        self.weights.load(averaged=True)
        self.model.eval()
        found = {split: round(self.heldout(split), 2) for split in self.judged}
        if self.model.any_order:
            found["val, raster"] = round(self.heldout("val", raster=True), 2)
        return found

    def go_on(self) -> None:
        """Put the trained weights into the model again."""
        self.weights.load(averaged=False)
        self.model.train()


def save_weights(trainer: Trainer, path: Path, about: dict) -> None:
    """The averaged weights, in float16, and the codebook."""
    named = {name: value.detach() for name, value in trainer.model.state_dict().items()}
    # T5 knows its word embeddings by two names.
    named.pop("text_encoder.encoder.embed_tokens.weight", None)
    named |= dict(zip((name for name, _ in trainer.model.named_parameters()), trainer.weights.averages, strict=True))
    named = {name: value.half().cpu().contiguous() for name, value in named.items()}
    named["codebook"] = trainer.vq.code_vectors().cpu()
    partial = path.with_suffix(".partial")
    save_file(named, partial, {"about": json.dumps(about)})
    partial.replace(path)


def train(given: argparse.Namespace) -> None:
    began, name, out = time.monotonic(), given.model, given.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    # It refuses some shapes of masks, which other fused kernels take.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device, dtype = given.device, fast_dtype(given.device)
    arrays, captions, vq = load_packed(given.data)
    tokenizer = word_tokenizer(caption for its in captions.values() for caption, _ in its)
    most = 64 if given.tiny else None
    splits = ("train", "val", "test")
    data = {split: Icons.of(arrays[split][:most], captions[split][:most], tokenizer, device) for split in splits}
    side = data["train"].pixels.shape[-1] // vq.scale_factor
    model = IconModel(name, len(tokenizer), vq.config.codebook_size, side, given.tiny)
    model.start_from_patches(vq.code_vectors())
    if given.start is not None:
        earlier = load_file(given.start)
        earlier = {key: value for key, value in earlier.items() if key != "codebook"}
        model.load_state_dict(earlier, strict=False)
    nn.Module.to(model, device, dtype)
    parameters = sum(it.numel() for it in model.parameters())
    trainer = Trainer(model, vq.to(device), data, given.batch_size, given.compile, given.seed)
    model.train()
    about = {
        "model": name,
        "parameters": parameters,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "batch_size": given.batch_size,
        "captions": sorted({caption for caption, _ in captions["train"]}),
        "words": tokenizer.convert_ids_to_tokens([*range(len(tokenizer))]),
        "transformer": {key: it for key, it in model.transformer.config.items() if not key.startswith("_")},
        "text": TEXT,
    }
    log = (out / f"{name}.jsonl").open("w", encoding="utf-8")

    def write(row: dict) -> None:
        row = {"seconds": round(time.monotonic() - began, 1), **row}
        print(name, json.dumps(row), flush=True)
        log.write(json.dumps(row) + "\n")
        log.flush()

    write({"parameters": parameters, "ready": True})
    try:
        loss = trainer.step(0.0).item()
    except Exception as error:
        # What a compiler refuses is not worth a lost run.
        if not given.compile:
            raise
        write({"compiling failed": repr(error)[:500]})
        trainer.losses = token_losses
        model.zero_grad(set_to_none=True)
        loss = trainer.step(0.0).item()
    write({"first loss": loss})

    # The end leaves time for a last report and samples.
    until, first, step, best = began + 60 * given.minutes - given.closing, time.monotonic(), 1, float("inf")
    next_report, next_line, since, passed = first + given.report, first + 5, step, first
    done, pace, before, length = 0.0, 1.0, first, max(until - first, 1.0)
    places = trainer.judged["val"][0].shape[1]
    recent = []

    def keep(last: bool) -> None:
        nonlocal best, pace
        figures = trainer.report()
        write({"step": step, "pictures": step * given.batch_size, **figures})
        if figures["val"] > best + WORSE:
            # The pictures are learned by heart from here on.
            pace = HURRY
        if figures["val"] < best:
            best = figures["val"]
            save_weights(trainer, out / f"{name}.safetensors", about | {"step": step, **figures})
        if last:
            save_sheet(trainer, tokenizer, out / f"{name}.png", tiny=given.tiny)
            write({"sheet": True})
        else:
            trainer.go_on()

    while done < 1 and (given.steps is None or step < given.steps):
        recent.append(trainer.step(done))
        step += 1
        now = time.monotonic()
        done, before = done + pace * (now - before) / length, now
        if step % 8 == 0 and device == "cuda":
            # So that the host does not run ahead of the clock.
            torch.cuda.synchronize()
        if time.monotonic() > next_line:
            mean = float(torch.stack(recent).mean()) * places
            speed = (step - since) * given.batch_size / (time.monotonic() - passed)
            write({"step": step, "nats": round(mean, 2), "pictures per second": round(speed)})
            recent, since, passed = [], step, time.monotonic()
            next_line = passed + (5 if passed - first < 20 else 20)
        if time.monotonic() > next_report and (1 - done) * length > pace * given.report / 2:
            keep(last=False)
            next_report, since, passed = time.monotonic() + given.report, step, time.monotonic()
    keep(last=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the file that arimage_icons.pack wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="arpg")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the whole run, compiling included")
    parser.add_argument("--closing", type=float, default=12.0, help="seconds for the last report and samples")
    parser.add_argument("--report", type=float, default=45.0, help="seconds between reports")
    parser.add_argument("--steps", type=int, help="stop after so many")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start", type=Path, help="weights of an earlier run")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a small model and few pictures, to try the script")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
