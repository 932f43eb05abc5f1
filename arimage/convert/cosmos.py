"""From the published files of Cosmos-Predict1's autoregressive models (https://github.com/nvidia-cosmos/cosmos-predict1) to a
`CosmosPipeline`."""

import re
from pathlib import Path

import torch
from diffusers.utils import logging

from ..models.transformer_cosmos import CosmosTransformer
from .checkpoint import fill, shape_of


logger = logging.get_logger(__name__)

KIND = "Cosmos-Predict1 autoregressive model"
# Layers of the published sizes, and whether their positions are those of YaRN, which no tensor says.
YARN = {16: False, 40: True}
# Names here and the original's, replaced from top to bottom.
NAMES = (
    (r"^token_embedding\.", "tok_embeddings."),
    (r"^head\.", "output."),
    (r"^blocks\.", "layers."),
    (r"\.feed_forward_norm\.", ".ffn_norm."),
    (r"\.(q|k|v)_proj\.", r".w\1."),
    (r"\.out_proj\.", ".wo."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)


def cosmos_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    shape: tuple[int, int, int] = (5, 40, 64),
    yarn: bool | None = None,
    source: str | Path = "the checkpoint",
) -> CosmosTransformer:
    """The transformer whose tensors are `state`, by their original names, with or without "model." in front, in their dtype.

    Args:
        shape: frames, rows and columns of the token maps that it was trained for.
        yarn: whether its positions are those of YaRN, which the files do not say; by default as in the published sizes, of which
            those of 40 layers have it.
        source: what errors call the file.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of an unexpected shape.
    """
    state = {key.removeprefix("model."): value for key, value in state.items() if not key.endswith("_extra_state")}

    def sizes(key: str, dimensions: int = 2) -> torch.Size:
        return shape_of(state, key, dimensions, source=source, kind=KIND)

    embeddings, hidden_size = sizes("tok_embeddings.weight")
    head_dim = sizes("layers.0.attention.q_norm.weight", 1)[0]
    layers = len({match[1] for key in state if (match := re.match(r"layers\.(\d+)\.", key))})
    if yarn is None:
        yarn = YARN.get(layers, False)
        if layers not in YARN:
            logger.warning(
                f"{source} has {layers} layers, as no published size: it is read without YaRN, give yarn=True if it has it"
            )
    text = "layers.0.cross_attention.wk.weight"
    vocab_size = sizes("output.weight")[0]
    with torch.device("meta"):
        transformer = CosmosTransformer(
            shape=tuple(shape),
            hidden_size=hidden_size,
            intermediate_size=sizes("layers.0.feed_forward.w1.weight")[0],
            num_layers=layers,
            num_attention_heads=sizes("layers.0.attention.wq.weight")[0] // head_dim,
            num_key_value_heads=sizes("layers.0.attention.wk.weight")[0] // head_dim,
            head_dim=head_dim,
            vocab_size=vocab_size,
            context_dim=sizes(text)[1] if text in state else None,
            embeddings=embeddings,
            yarn=yarn,
        )
    for key in state:
        if re.search(r"\.attention\.(wq|wk|q_norm|k_norm)\.weight$", key):
            state[key] = in_pairs(state[key], head_dim)
    dtype = state["tok_embeddings.weight"].dtype
    return fill(transformer, state, _original_name, dtype=dtype, ignored="", source=source)


def in_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The rows of a weight [heads * head_dim, ...] in the order of heads whose neighbours turn together, from that of heads whose
    halves do."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def _original_name(name: str) -> str:
    for ours, original in NAMES:
        name = re.sub(ours, original, name)
    return name
