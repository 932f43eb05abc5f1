"""The memory of a training step of a language model with and without `--gradient-checkpointing`: the most bytes that
its tensors have at a time, gradients among them, without the weights. It runs on the CPU, in float32.

python benchmarks/checkpointed_layers.py
"""

import argparse

import torch
from peak_memory import Peak
from transformers import LlamaConfig, LlamaModel


def measure(config: LlamaConfig, batch: int, length: int, again: bool) -> int:
    """The most bytes of a step at a time; `again` computes the layers again."""
    torch.manual_seed(0)
    model = LlamaModel(config).train()
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    hidden = torch.randn(batch, length, config.hidden_size)
    with Peak() as peak:
        model(inputs_embeds=hidden, use_cache=False).last_hidden_state.square().mean().backward()
    return peak.most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--length", type=int, default=600)
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 43 // 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        vocab_size=64,
    )
    for again in (False, True):
        found = measure(config, args.batch_size, args.length, again)
        print(f"{'layers computed again' if again else 'all kept'}: {found / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
