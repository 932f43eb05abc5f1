"""Whether a change of the code changes any image: hashes of the tokens of packaged models, for every decoding.

Twenty images of each. An interrupted run resumes. With --compare it prints what differs from the file of other code:
tokens (continuous ones to 1e-3), forward passes or calls of a denoising head.

python tools/token_hashes.py --out before.json
python tools/token_hashes.py --out after.json --compare before.json
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch

from arimage import AutoPipeline
from arimage.auto import packaged_models
from arimage.decoding import PRESETS


PROMPTS = ["a red heart", "a blue book", "pizza", "a cat", "a dog"]


def digest(tokens: torch.Tensor | list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for part in tokens if isinstance(tokens, list) else [tokens]:
        rounded = (part * 1000).round() if part.is_floating_point() else part
        found.update(rounded.contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=packaged_models())
    parser.add_argument("--decoding", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path)
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for model in arguments.model:
        pipe = AutoPipeline.from_pretrained(model)
        pipe.set_progress_bar_config(disable=True)
        count = "num_videos_per_prompt" if pipe.abilities.generates_video else "num_images_per_prompt"
        for decoding in arguments.decoding:
            name = f"{model} {decoding}"
            if name in found or decoding not in pipe.decoding_names:
                continue
            generators = [torch.Generator().manual_seed(seed) for seed in range(4 * len(PROMPTS))]
            settings = {count: 4, "decoding": decoding, "output_type": "latent"}
            out = pipe(PROMPTS, generator=generators, **settings)
            found[name] = [digest(out.tokens), out.stats.forward_passes, out.stats.head_calls]
            arguments.out.write_text(json.dumps(found, indent=1))
            print(name, *found[name][1:], flush=True)
    if arguments.compare:
        before = json.loads(arguments.compare.read_text())
        same = [name for name in before if before[name] == found.get(name)]
        print(f"{len(same)} of {len(before)} are the same")
        for name in sorted(before.keys() - set(same)):
            print(f"{name}: {before[name]}, now {found.get(name)}")


if __name__ == "__main__":
    main()
