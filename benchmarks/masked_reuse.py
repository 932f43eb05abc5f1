"""What ReCAP, LazyMAR and ML-Cache save of an image, with random weights on a CPU: rows that the layers evaluate, and
seconds. The decodings take turns, one step each, so that whatever else the machine does slows all of them.

python benchmarks/masked_reuse.py                        MAR-B
python benchmarks/masked_reuse.py --model halton-maskgit the base size of 256 pixels
python benchmarks/masked_reuse.py --model lumina-dimoo   8 layers of width 512, 32x32 tokens
python benchmarks/masked_reuse.py --steps 16 --diffusion-steps 10 --decoding mar recap:full_steps=0
"""

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from arimage.decoding import LatentSampling, Layout, Sampling, decoding_from_text
from arimage.models.denoising_head import DenoisingHead
from arimage.models.layers import init_normal
from arimage.pipelines.halton_maskgit.pipeline_halton_maskgit import CONFIDENCE as HALTON
from arimage.pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITModel, HaltonMaskGITTransformer
from arimage.pipelines.lumina_dimoo.masked_model import LuminaDiMOOModel
from arimage.pipelines.lumina_dimoo.pipeline_lumina_dimoo import CONFIDENCE as LUMINA
from arimage.pipelines.lumina_dimoo.transformer_lumina_dimoo import LuminaDiMOOTransformer
from arimage.pipelines.mar.transformer_mar import MARLatentModel, MARTransformer


LABEL = torch.tensor([207])


class Measured(NamedTuple):
    """A model, how its tokens are sampled, the modules that each evaluate the rows of a layer, by the part that they
    are counted in, the decodings that are compared by default, and the methods that count as its head."""

    model: Any
    sampling: Sampling
    layers: dict[str, Iterable[nn.Module]]
    decodings: tuple[str, ...]
    head: tuple[str, ...] = ()


def random(network: nn.Module) -> Any:
    init_normal(network)
    return network.eval()


def mar(args: argparse.Namespace) -> Measured:
    network, head = random(MARTransformer()), random(DenoisingHead())
    steps = {"num_inference_steps": args.steps or 64, "num_diffusion_steps": args.diffusion_steps}
    parts = {"encoder": network.encoder_blocks, "decoder": network.decoder_blocks, "head": head.blocks}
    return Measured(
        MARLatentModel(network, head, LABEL, Layout((16, 16)), guided=True),
        LatentSampling(guidance_scale=2.9, **steps),
        {part: [block.fc1 for block in blocks] for part, blocks in parts.items()},
        ("mar", "recap", "lazy-mar"),
        ("denoise", "denoise_lazily"),
    )


def halton_maskgit(args: argparse.Namespace) -> Measured:
    network, steps = random(HaltonMaskGITTransformer()), args.steps or 32
    return Measured(
        HaltonMaskGITModel(network, {"class_labels": LABEL}, Layout((16, 16)), HALTON, guided=True),
        Sampling(guidance_scale=1.7),
        {"blocks": [block.feed_forward for block in network.blocks]},
        (f"halton:steps={steps}", f"recap:steps={steps}"),
    )


def lumina_dimoo(args: argparse.Namespace) -> Measured:
    shape = {"hidden_size": 512, "num_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
    network, steps = random(LuminaDiMOOTransformer(**shape)), args.steps or 64
    # The prompt of the branch without one is shorter.
    prompts = [[torch.randint(1000, (length,))] for length in (48, 24)]
    return Measured(
        LuminaDiMOOModel(network, prompts, Layout((32, 32)), LUMINA),
        Sampling(guidance_scale=5.0),
        {"blocks": [block.feed_forward for block in network.blocks]},
        (f"confidence:steps={steps}", f"ml-cache:steps={steps}"),
    )


MODELS = {"mar": mar, "halton-maskgit": halton_maskgit, "lumina-dimoo": lumina_dimoo}


class Meter:
    """Counts rows of layers and seconds of what runs inside it."""

    def __init__(self, measured: Measured):
        self.rows, self.seconds, self.running = Counter(), defaultdict(float), ""
        for part, layers in measured.layers.items():
            for layer in layers:
                layer.register_forward_pre_hook(lambda module, args, part=part: self._count(part, args[0]))
        for name in measured.head:
            setattr(measured.model, name, self._timed(getattr(measured.model, name)))

    def _count(self, part, hidden):
        self.rows[self.running, part] += hidden[..., 0].numel()

    def _timed(self, function):
        def timed(*args, **options):
            began = time.perf_counter()
            found = function(*args, **options)
            self.seconds[self.running, "head"] += time.perf_counter() - began
            return found

        return timed

    def run(self, name, function, *args):
        self.running, began = name, time.perf_counter()
        found = function(*args)
        self.seconds[name, "all"] += time.perf_counter() - began
        return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="mar")
    parser.add_argument("--decoding", nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--diffusion-steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    measured = MODELS[args.model](args)
    meter, given = Meter(measured), (measured.model, measured.sampling, torch.tensor([0]))
    decodings = {text: decoding_from_text(text) for text in args.decoding or measured.decodings}
    states = {text: meter.run(text, decoding.start, *given) for text, decoding in decodings.items()}
    while not all(state.over for state in states.values()):
        for text, state in states.items():
            if not state.over:
                meter.run(text, decodings[text].step, state)
    first, parts = next(iter(states)), list(measured.layers)
    print(f"| decoding | passes | million rows: {' | '.join(parts)} | seconds | of these the head | share |")
    print("|---|" + "---:|" * (4 + len(parts)))
    for text, state in states.items():
        rows = " | ".join(f"{meter.rows[text, part] / 1e6:.3f}" for part in parts)
        seconds, share = meter.seconds[text, "all"], meter.seconds[text, "all"] / meter.seconds[first, "all"]
        head = meter.seconds[text, "head"]
        print(f"| `{text}` | {state.forward_passes} | {rows} | {seconds:.1f} | {head:.1f} | {share:.2f} |")


if __name__ == "__main__":
    main()
