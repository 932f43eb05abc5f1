"""`python -m arimage_icons.compositions`: whether a model reads both words of held-out compositions: the loss of their
icons with both, with one of them, with none, and with those of another composition."""

import argparse
from pathlib import Path

import torch
from torch import nn

from arimage import AutoPipeline
from arimage.cli.options import fast_dtype
from arimage.eval.report import markdown_table
from arimage.pipelines.kinds.class_or_text import ClassOrTextPipeline
from arimage.training.losses import losses_of
from arimage.training.orders import Orders
from arimage.training.tokens.cache import TokenCache


BATCH = 64
# The last of several captions is without words of style.
PLAIN = 0.999


def readings(captions: list[str]) -> dict[str, tuple[list[str], bool]]:
    """What is given for icons with these captions of two words, and whether anything is."""
    names = sorted(set(captions))
    # Far enough that no word is the same.
    other = {name: names[(place + len(names) // 2) % len(names)] for place, name in enumerate(names)}
    first, second = zip(*(caption.split() for caption in captions), strict=True)
    return {
        "both words": (captions, True),
        "the first word": ([*first], True),
        "the second word": ([*second], True),
        "no words": (captions, False),
        "another composition": ([other[caption] for caption in captions], True),
    }


@torch.no_grad()
def losses_by_reading(
    pipe: ClassOrTextPipeline, tokens: torch.LongTensor, captions: list[str]
) -> dict[str, torch.Tensor]:
    """The loss of icons with these tokens [N, K] and captions, in nats, [N], by what the model is given; those of an
    any-order model in farthest order."""
    orders = Orders(farthest_share=1.0) if pipe.abilities.accepts("order") else Orders()
    losses, found = losses_of(pipe, captions[0], orders=orders), {}
    for name, (texts, given) in readings(captions).items():
        parts = []
        for start in range(0, len(texts), BATCH):
            part = tokens[start : start + BATCH]
            without, generator = torch.full((len(part),), not given), torch.Generator().manual_seed(0)
            loss = losses(texts[start : start + BATCH], part, without, part.shape[1], generator)
            parts.append(loss.float().sum(1))
        found[name] = torch.cat(parts)
    return found


def compare(models: list[str], tokens: Path) -> str:
    """A table of the mean losses of some models on the icons whose names have two words that all of them know.

    Raises:
        ValueError: if there are none.
    """
    cache, pipes = TokenCache(tokens), [AutoPipeline.from_pretrained(model) for model in models]
    words = set.intersection(*(set(pipe.tokenizer.get_vocab()) for pipe in pipes))
    images = range(len(cache))
    every, captions = cache.read([*images], [0] * len(cache), [PLAIN] * len(cache))
    kept = [one for one in images if captions[one].count(" ") == 1 and words.issuperset(captions[one].split())]
    if not kept:
        raise ValueError(f"no icon in {tokens} has a name of two words that the models know: give others")
    rows: list[list[str]] = []
    for model, pipe in zip(models, pipes, strict=True):
        for part in (pipe.transformer, pipe.text_encoder):
            nn.Module.to(part, dtype=fast_dtype("cpu"))
        found = losses_by_reading(pipe, every[kept], [captions[one] for one in kept])
        rows.append([model, str(len(kept)), *(f"{loss.mean():.1f}" for loss in found.values())])
    return "\n".join(markdown_table(["model", "icons", *found], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="names or folders of models of icons")
    parser.add_argument("--tokens", type=Path, required=True, help="tokens of compositions.parquet with captions")
    given = parser.parse_args()
    try:
        print(compare(given.models, given.tokens))
    except (OSError, ValueError) as error:
        parser.error(str(error))
