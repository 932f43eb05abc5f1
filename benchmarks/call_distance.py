"""How far it is from a call of a pipeline to the step of a decoding: the functions and files of arimage that a call
runs through, how deep they are nested, and Python calls per forward pass.

python benchmarks/call_distance.py
python benchmarks/call_distance.py --files
python benchmarks/call_distance.py --model icons-arpg --prompt "a heart" --decoding ar
"""

import argparse
import sys
from pathlib import Path

import torch

import arimage


PACKAGE = str(Path(arimage.__file__).parent)


class Distance:
    """Counts calls of functions of arimage by `sys.setprofile`."""

    def __init__(self):
        self.functions, self.files, self.deepest, self.calls = set(), {}, [], 0
        self._stack = []

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        self.calls += 1
        self._stack.append(f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}")
        self.files.setdefault(code.co_filename, self._stack[-1])
        self.functions.add((code.co_filename, code.co_firstlineno))
        if len(self._stack) > len(self.deepest):
            self.deepest = list(self._stack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-llamagen")
    parser.add_argument("--prompt", default="a red heart")
    parser.add_argument("--decoding", default="ar")
    parser.add_argument("--deepest", action="store_true", help="print the deepest stack")
    parser.add_argument(
        "--files",
        action="store_true",
        help="print the files in the order in which they are reached, each by a function",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = arimage.AutoPipeline.from_pretrained(options.model)
    pipe.set_progress_bar_config(disable=True)

    def generate():
        return pipe(options.prompt, decoding=options.decoding, generator=torch.Generator().manual_seed(0))

    generate()
    distance = Distance()
    sys.setprofile(distance)
    try:
        out = generate()
    finally:
        sys.setprofile(None)
    passes = out.stats.forward_passes
    print(f"{options.model}, {options.decoding}: {passes} forward passes")
    print(f"functions: {len(distance.functions)}")
    print(f"files: {len(distance.files)}")
    print(f"frames: {len(distance.deepest)}")
    print(f"Python calls per forward pass: {distance.calls / passes:.0f}")
    if options.files:
        print("\n".join(distance.files.values()))
    if options.deepest:
        print("\n".join(distance.deepest))


if __name__ == "__main__":
    main()
