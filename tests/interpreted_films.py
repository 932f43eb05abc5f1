"""Prints how far the logits of the passes of a tiny InfinityStar film by the kernels of a step in Triton's interpreter
are from those of the layers in torch; see `interpreted_steps.py`. Also holds the passes.

python tests/interpreted_films.py
"""

import json

import pytest
import torch
from steps import allow_steps, count_layers

from arimage.kernels.operation import DEVICES
from arimage.models import step
from arimage.models.conditions import with_unconditional
from arimage.models.quantized import QuantizedLinear
from arimage.pipelines.infinitystar.scale_model import InfinityStarScaleModel
from arimage.pipelines.infinitystar.schedules import Repetitions
from arimage.pipelines.infinitystar.schedules import passes as passes_of
from arimage.pipelines.infinitystar.transformer_infinitystar import InfinityStarTransformer


# Rows of the passes of the film below, with guidance. The keys of one are kept; one has more rows than a step takes.
ROWS = [8, 24, 32, 96]


def film(padded: bool = True, quantized: bool = False) -> InfinityStarScaleModel:
    """Two films of 1 and 4 latent frames, for texts of 5 tokens with padding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    shape = {"caption_dim": 16, "num_text_tokens": 8, "latent_channels": 4, "bits": (1, 2), "num_layers": 2}
    network = InfinityStarTransformer(**sizes, **shape).eval()
    for name, part in list(network.blocks.named_modules()):
        if isinstance(part, torch.nn.RMSNorm):
            torch.nn.init.uniform_(part.weight, 0.5, 1.5)
        elif quantized and isinstance(part, torch.nn.Linear):
            network.blocks.set_submodule(name, QuantizedLinear(part, torch.int8))
    seen = torch.tensor([[True] * 5, [True] * 3 + [not padded] * 2])
    condition = with_unconditional(
        {"prompt_embeds": torch.randn(2, 5, 16), "prompt_attention_mask": seen}, kept=("prompt_attention_mask",)
    )
    passes = passes_of(((1, 2), (2, 3)), 5, (1, 2), Repetitions(1, (1, 1), (1, 1)))
    return InfinityStarScaleModel(network, condition, passes, (2, 3), guided=True, padded=padded)


@torch.no_grad()
def passes(model: InfinityStarScaleModel, **settings) -> list[torch.Tensor]:
    """The logits of all passes, the last also without the rows that have no text."""
    generator = torch.Generator().manual_seed(1)
    cache, logits = model.prefill(2, **settings)
    latents = [torch.randn(2, 4, 5, 2, 3, generator=generator) for _ in range(3)]
    found = [logits, *(model.forward(scale, latent, cache) for scale, latent in enumerate(latents, 1))]
    return [*found, model.forward(2, latents[1], cache, guided=False)]


def main() -> None:
    model = film()
    expected = passes(model)
    with pytest.MonkeyPatch.context() as patch:
        heads = step.HEAD_DIMS
        allow_steps(patch)
        patch.setattr(step, "HEAD_DIMS", heads)
        rows = count_layers(patch)
        DEVICES.add("cpu")
        found = passes(model)
    distances = [float((one - other).abs().max()) for one, other in zip(expected, found, strict=True)]
    print(json.dumps({"distances": distances, "rows": rows}))


if __name__ == "__main__":
    main()
