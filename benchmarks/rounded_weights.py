"""How far the distributions of a model with rounded weights are from those with full ones: the mean total variation of
a token, over the tokens that `ar` samples in float32, as for lossy decodings. All compute with the settings of the
checkpoint.

python benchmarks/rounded_weights.py --model emoji-llamagen --images 16
"""

import argparse

import torch
from side_by_side import spread

from arimage import AutoPipeline
from arimage.decoding import AutoregressiveDecoding, decode


KINDS = {"bfloat16": (torch.bfloat16, False), "int8, float32": (torch.float32, True), "int8": (torch.bfloat16, True)}
PROMPTS = ["a red heart", "a blue book", "pizza", "a green car"]


def prepared(name: str, images: int, dtype: torch.dtype, rounded: bool):
    pipe = AutoPipeline.from_pretrained(name, dtype=dtype)
    if rounded:
        pipe.quantize_weights()
    return pipe.prepare((PROMPTS * images)[:images])


def probabilities(call, tokens: torch.LongTensor) -> torch.FloatTensor:
    """Those of all tokens [B, N] given the ones before, [B, N, V]."""
    cache, first = call.model.prefill(len(tokens))
    places = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    later = call.model.forward(tokens[:, :-1], places[:, :-1], cache)
    return call.sampling.probabilities(torch.cat([first[:, :, None], later], dim=2), places)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-llamagen")
    parser.add_argument("--images", type=int, default=16)
    arguments = parser.parse_args()
    call = prepared(arguments.model, arguments.images, torch.float32, False)
    seeds = torch.arange(arguments.images)
    tokens = decode(call.model, AutoregressiveDecoding(), call.sampling, seeds).tokens
    full = probabilities(call, tokens)
    for name, kind in KINDS.items():
        other = probabilities(prepared(arguments.model, arguments.images, *kind), tokens)
        distance = (full - other).abs().sum(-1) / 2
        changed = (full.argmax(-1) != other.argmax(-1)).double().mean()
        print(f"{name}: total variation {spread(distance.mean(1).tolist(), 4)} per image, most likely: {changed:.4f}")


if __name__ == "__main__":
    main()
