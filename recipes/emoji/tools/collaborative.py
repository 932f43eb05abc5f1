"""Collaborative decoding at every hand-over compared with the large model alone: seconds, memory, retrieval,
deviation.

python recipes/emoji/tools/collaborative.py --train train.parquet
"""

import argparse
import statistics

import torch
from emoji_quality import caption_retrieval

from arimage import AutoPipeline, CollaborativeDecoding, NextScaleDecoding
from arimage.eval.bench.judge import judge
from arimage.eval.bench.memory import peak_memory, reset_peak_memory
from arimage_emoji.training.captioned import load_captioned_images
from arimage_emoji.training.recipe import load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--model", default="emoji-var")
    parser.add_argument("--recipe", default="emoji-var")
    parser.add_argument("--count", type=int, default=200, help="captions of the retrieval")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()

    recipe = load_recipe(arguments.recipe)
    pipe = AutoPipeline.from_pretrained(arguments.model)
    pipe.set_progress_bar_config(disable=True)
    size = recipe["image_size"]
    trained_on = load_captioned_images(arguments.train, size, **recipe["transformer"]["data"])
    gallery = load_captioned_images(arguments.train, size, **recipe["tokenizer"]["data"])
    scales = pipe.vq.config.scales
    decodings = {"next-scale": NextScaleDecoding()}
    for count in range(len(scales) - 1, 0, -1):
        decodings[f"code:drafter_scales={count}"] = CollaborativeDecoding(count)
    condition = {"prompt": [captions[0] for captions in trained_on.captions[: arguments.batch_size]]}
    seconds, memory = {name: [] for name in decodings}, {name: [] for name in decodings}
    # In turn, and the first call of each is not timed: it includes one-time setup.
    for run in range(-1, arguments.runs):
        for name, decoding in decodings.items():
            reset_peak_memory(pipe.device)
            generator = torch.Generator().manual_seed(run)
            stats = pipe(**condition, decoding=decoding, generator=generator, output_type="pt").stats
            if run >= 0:
                seconds[name].append(stats.prefill_seconds + stats.decode_seconds + stats.tokenizer_seconds)
                memory[name] += peak_memory(pipe.device)
    print(
        f"Batch of {arguments.batch_size}, medians of {arguments.runs} runs with ranges, {torch.get_num_threads()} "
        "threads.\n"
    )
    print("| decoding | tokens by the refiner | seconds | peak MiB | top-1 | top-5 | deviation (floor) |")
    print("| --- " * 7 + "|")
    for name, decoding in decodings.items():
        found = caption_retrieval(pipe, trained_on, gallery, count=arguments.count, decoding=decoding)
        judged = judge(pipe, condition, decoding, images=32, seed=0)["deviation"]
        drafted = getattr(decoding, "drafter_scales", len(scales))
        cells = [
            name,
            f"{sum(side * side for side in scales[drafted:])} of {sum(side * side for side in scales)}",
            f"{statistics.median(seconds[name]):.2f} ({min(seconds[name]):.2f} to {max(seconds[name]):.2f})",
            f"{statistics.median(memory[name]):.0f}" if memory[name] else "",
            f"{found['top-1']:.1%}",
            f"{found['top-5']:.1%}",
            f"{judged['total_variation']:.4f} ({judged['floor']:.4f})",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
