"""How often a token of GLM-Image's large grid equals that of the small grid at the same place, which a draft could
copy. For comparison: the small grid of another image, and the tokens to the left and above, which `init` can copy.

    python benchmarks/coarse_drafts.py zai-org/GLM-Image --prompts prompts.txt
"""

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from arimage.cli.options import Device, Dtype, load_pipeline
from arimage.eval.metrics.standard_errors import estimate_text, standard_error
from arimage.eval.runs.prompts import read_prompts


PROMPTS = Path(__file__).with_name("first_prompts.txt")


def shares(small: torch.LongTensor, large: torch.LongTensor) -> dict[str, torch.Tensor]:
    """The share [B] of the tokens of large grids [B, H, W] that equal each of these drafts, among those that have
    one. `small` is [B, h, w]."""
    at_place = F.interpolate(small[:, None].double(), large.shape[1:], mode="nearest-exact")[:, 0].long()
    drafts = {
        "the small grid": (large, at_place),
        "the small grid of another image": (large, at_place.roll(1, 0)),
        "the token to the left": (large[:, :, 1:], large[:, :, :-1]),
        "the token above": (large[:, 1:], large[:, :-1]),
    }
    return {name: (tokens == draft).double().mean((1, 2)) for name, (tokens, draft) in drafts.items()}


def main(
    model: Annotated[str, typer.Argument(help="A folder of GLM-Image, or its Hub id.")],
    prompts: Annotated[Path, typer.Option(help="A file with a prompt per line, two or more.")] = PROMPTS,
    height: int = 1024,
    width: int = 1024,
    batch_size: int = 4,
    decoding: str = "sjd-coupled",
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    pipe = load_pipeline(model, device, dtype)
    texts = [row["prompt"] for row in read_prompts(prompts)]
    settings = {"height": height, "width": width, "batch_size": batch_size, "decoding": decoding}
    small, large = pipe(texts, **settings, generator=torch.Generator().manual_seed(0), output_type="latent").tokens
    print(f"Tokens of the large grid ({len(texts)} images of {height}x{width}) that equal")
    for name, share in shares(small, large).items():
        percent = 100 * share.numpy()
        print(f"{name}: {estimate_text(percent.mean(), standard_error(percent), None)} %")


if __name__ == "__main__":
    typer.run(main)
