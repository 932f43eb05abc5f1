"""`python -m arimage_icons.resize`: what a training on more words begins with, a packaged model with embeddings of new
words and with narrower feed-forward layers."""

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from arimage import AutoPipeline
from arimage.models.layers import FeedForward
from arimage.pipelines.arpg.pipeline_arpg import ARPGPipeline
from arimage.training.losses import losses_of
from arimage.training.orders import Orders
from arimage.training.saving import save_float16
from arimage.training.tokens.cache import TokenCache
from arimage.training.tokens.heldout import reported


# Pictures on which the use of units is measured, and of one batch.
PICTURES, BATCH = 512, 64


def with_words(encoder: T5EncoderModel, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast) -> None:
    """Give the encoder the embeddings of the tokens of another tokenizer, in place: those of words that the old one
    has are kept, and others begin as transformers begins new ones, near the mean of all."""
    before = encoder.shared.weight.detach().clone()
    ids = old.get_vocab()
    encoder.resize_token_embeddings(len(before) + len(new))
    weight = encoder.shared.weight.detach()[len(before) :].clone()
    for word, place in new.get_vocab().items():
        if word in ids:
            weight[place] = before[ids[word]]
    encoder.resize_token_embeddings(len(new))
    with torch.no_grad():
        encoder.shared.weight.copy_(weight)


def cut(layer: FeedForward, gram: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """The weights of a feed-forward layer with `width` of its hidden units: those that contribute most to its output.
    The last projection is the one with the least squared error, given `gram` [H, H], the products of the states of
    each pair of units summed over examples, float64."""
    down = layer.down_proj.weight.double()
    used = (gram.diagonal() * down.square().sum(0)).topk(width).indices.sort().values
    kept = gram[used][:, used]
    ridge = 1e-6 * kept.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    return {
        "gate_proj.weight": layer.gate_proj.weight[used],
        "up_proj.weight": layer.up_proj.weight[used],
        "down_proj.weight": torch.linalg.solve(kept + ridge, gram[used] @ down.T).T.float(),
    }


@torch.no_grad()
def narrower(pipe: ARPGPipeline, cache: TokenCache, width: int) -> ARPGPipeline:
    """The pipeline with feed-forward layers of `width` hidden units, which are chosen by pictures of a cache.

    Raises:
        ValueError: if its layers are narrower.
    """
    old = pipe.transformer
    if width > old.config.intermediate_size:
        raise ValueError(f"--hidden is {width}, and the layers have {old.config.intermediate_size} units: give fewer")
    layers = {name: module for name, module in old.named_modules() if isinstance(module, FeedForward)}
    grams = {name: torch.zeros(old.config.intermediate_size, old.config.intermediate_size).double() for name in layers}

    def add(name):
        def hook(module, args):
            hidden = args[0].flatten(0, -2)
            grams[name] += (hidden.T @ hidden).double()

        return hook

    hooks = [layer.down_proj.register_forward_pre_hook(add(name)) for name, layer in layers.items()]
    images = reported(cache, PICTURES)
    losses = losses_of(pipe, cache.read([0], [0])[1][0], orders=Orders(farthest_share=1.0))
    for part in images.split(BATCH):
        tokens, captions = cache.read(part.tolist(), [0] * len(part))
        without = torch.zeros(len(part), dtype=torch.bool)
        losses(captions, tokens, without, tokens.shape[1], torch.Generator().manual_seed(0))
    for hook in hooks:
        hook.remove()
    weights = old.state_dict()
    for name, layer in layers.items():
        weights |= {f"{name}.{part}": weight for part, weight in cut(layer, grams[name], width).items()}
    new = type(old).from_config(dict(old.config) | {"intermediate_size": width})
    new.load_state_dict(weights)
    changed = type(pipe)(**pipe.components | {"transformer": new})
    changed.take_defaults(pipe)
    return changed


def resize(model: str, words: Path, tokens: Path, hidden: int, out: Path) -> None:
    """Write the folder of a pipeline `out` from that of an any-order model of icons."""
    pipe = AutoPipeline.from_pretrained(model, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(words)
    pipe = narrower(pipe, TokenCache(tokens), hidden)
    before = len(pipe.tokenizer)
    with_words(pipe.text_encoder, pipe.tokenizer, tokenizer)
    pipe.tokenizer = tokenizer
    save_float16(pipe, out)
    count = sum(weight.numel() for part in (pipe.transformer, pipe.text_encoder) for weight in part.parameters())
    print(f"{out}: {count:,} parameters, {len(tokenizer) - before} tokens more than before")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="icons-arpg", help="name or folder of an any-order model of icons")
    parser.add_argument("--words", type=Path, required=True, help="tokenizer that arimage_icons.captions wrote")
    parser.add_argument("--tokens", type=Path, required=True, help="tokens of icons, of `arimage train tokens`")
    parser.add_argument("--hidden", type=int, required=True, help="hidden units of a feed-forward layer")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    given = parser.parse_args()
    try:
        resize(given.model, given.words, given.tokens, given.hidden, given.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
