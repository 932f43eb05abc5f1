"""What ReCAP and LazyMAR save of an image of MAR-B, with random weights on a CPU: rows that the layers evaluate, and
seconds. The decodings take turns, one step each, so that whatever else the machine does slows all of them.

python benchmarks/masked_reuse.py
python benchmarks/masked_reuse.py --steps 16 --diffusion-steps 10 --decoding mar recap:full_steps=0
"""

import argparse
import time
from collections import Counter, defaultdict

import torch

from arimage.decoding import LatentSampling, Layout, decoding_from_text
from arimage.models.denoising_head import DenoisingHead
from arimage.models.layers import init_normal
from arimage.pipelines.mar.transformer_mar import MARLatentModel, MARTransformer


PARTS = ("encoder", "decoder", "head")


def build() -> tuple[MARTransformer, DenoisingHead]:
    torch.manual_seed(0)
    transformer, head = MARTransformer().eval(), DenoisingHead().eval()
    init_normal(transformer)
    init_normal(head)
    return transformer, head


class Meter:
    """Counts rows of layers and seconds of what runs inside it."""

    def __init__(self, model: MARLatentModel):
        self.rows, self.seconds, self.running = Counter(), defaultdict(float), ""
        network = model.transformer
        blocks = zip(PARTS, (network.encoder_blocks, network.decoder_blocks, model.head.blocks), strict=True)
        for part, layers in blocks:
            for layer in layers:
                layer.fc1.register_forward_pre_hook(lambda module, args, part=part: self._count(part, args[0]))
        for name in ("denoise", "denoise_lazily"):
            setattr(model, name, self._timed(getattr(model, name)))

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
    parser.add_argument("--decoding", nargs="+", default=["mar", "recap", "lazy-mar"])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--diffusion-steps", type=int, default=100)
    args = parser.parse_args()
    sampling = LatentSampling(
        guidance_scale=2.9, num_inference_steps=args.steps, num_diffusion_steps=args.diffusion_steps
    )
    model = MARLatentModel(*build(), torch.tensor([207]), Layout((16, 16)), guided=True)
    meter, seeds = Meter(model), torch.tensor([0])
    decodings = {text: decoding_from_text(text) for text in args.decoding}
    states = {text: meter.run(text, decoding.start, model, sampling, seeds) for text, decoding in decodings.items()}
    while not all(state.over for state in states.values()):
        for text, state in states.items():
            if not state.over:
                meter.run(text, decodings[text].step, state)
    first = args.decoding[0]
    print("| decoding | passes | million rows: encoder | decoder | head | seconds | of these the head | share |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for text, state in states.items():
        rows = " | ".join(f"{meter.rows[text, part] / 1e6:.3f}" for part in PARTS)
        seconds, share = meter.seconds[text, "all"], meter.seconds[text, "all"] / meter.seconds[first, "all"]
        head = meter.seconds[text, "head"]
        print(f"| `{text}` | {state.forward_passes} | {rows} | {seconds:.1f} | {head:.1f} | {share:.2f} |")


if __name__ == "__main__":
    main()
