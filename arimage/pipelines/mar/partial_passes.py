"""Forward passes of a `MARTransformer` over few of its rows: the context stands in for all others. Rows are the
buffers, followed by the places of tokens."""

import torch
import torch.nn.functional as F

from ...models.layers import additive
from .context import LazyRows, MARContext


def evaluate_places(
    network,
    tokens: torch.Tensor,
    visible: torch.BoolTensor,
    count: int,
    class_labels: torch.LongTensor,
    context: MARContext,
    places: torch.LongTensor,
    known: int,
    keep_buffers: bool,
    padded: bool,
) -> torch.Tensor:
    """Conditions [B, Q, C] of `places` [B, Q]; see `MARTransformer.forward`."""
    fed, inside = 0 if keep_buffers else network.config.num_buffers, places.clamp(max=visible.shape[1] - 1)
    seen = (visible.gather(1, inside) & (places < visible.shape[1]))[:, :known]
    first = context.known.repeat(len(places) // len(context.known))
    hidden = _encode_more(network, tokens, visible, count, class_labels, context, inside, seen, first, fed, padded)
    buffers, hidden = hidden.split([fed, known], dim=1)
    hidden = torch.where(seen[..., None], hidden, network.mask_token.to(hidden.dtype))
    masked = network.mask_token.to(hidden.dtype).expand(len(places), places.shape[1] - known, -1)
    hidden = torch.cat([buffers, hidden, masked], dim=1) + network.decoder_position[0, _rows(network, inside, fed)]
    context.decoder.write_at(_rows(network, places, fed), context.size)
    for layer, block in enumerate(network.decoder_blocks):
        hidden = block(hidden, None, context.decoder, layer)
    return network.decoder_norm(hidden)[:, fed:] + network.output_position[0, inside]


def evaluate_lazily(
    network,
    tokens: torch.Tensor,
    visible: torch.BoolTensor,
    count: int,
    class_labels: torch.LongTensor,
    context: MARContext,
    places: torch.LongTensor,
    lazy: LazyRows,
    padded: bool,
) -> torch.Tensor:
    """Conditions [G * B, Q, C] of `places` [B, Q], given the other arguments for the branch with the class alone; see
    `MARTransformer.forward`."""
    fed, size, width, inputs = network.config.num_buffers, visible.shape[1], context.size, context.inputs
    assert inputs is not None
    inside, seen = lazy.new.clamp(max=size - 1), lazy.new < size
    hidden = _encode_more(
        network, tokens, visible, count, class_labels, context, inside, seen, context.known, fed, padded
    )
    context.known += seen.sum(1)
    hidden = hidden + network.decoder_position[0, _rows(network, inside, fed)]
    at = _rows(network, lazy.new, fed)[..., None].expand_as(hidden)
    inputs.scatter_(1, at, hidden.detach().to(inputs.dtype))
    hidden, cache = inputs[:, :width], context.decoder
    cache.write_all()
    for layer, block in enumerate(network.decoder_blocks[: lazy.layer]):
        hidden = block(hidden, None, cache, layer)
    block, values = network.decoder_blocks[lazy.layer], cache.values[lazy.layer][:, :, :width]
    before = values.clone()
    hidden = block.attention(hidden, None, cache, lazy.layer)
    likeness = F.cosine_similarity(values.float(), before.float(), dim=-1).mean(1)
    # Those that must be evaluated come before all others.
    forced = fed + torch.cat([lazy.new, places], dim=1)
    likeness = F.pad(likeness, (0, 1)).scatter(1, forced, -2)[:, :width]
    chosen = likeness.topk(lazy.most, largest=False).indices
    live = torch.arange(lazy.most, device=chosen.device) < lazy.count[:, None]
    chosen = torch.where(live, chosen, width)
    hidden = F.pad(hidden, (0, 0, 0, 1)).gather(1, chosen[..., None].expand(-1, -1, hidden.shape[-1]))
    hidden = block.feed_forward(hidden)
    cache.write_at(chosen, width)
    for layer in range(lazy.layer + 1, len(network.decoder_blocks)):
        hidden = network.decoder_blocks[layer](hidden, None, cache, layer)
    final = hidden.new_zeros(len(hidden), width + 1, hidden.shape[-1])
    final = final.scatter(1, chosen[..., None].expand_as(hidden), hidden)
    at = fed + places[..., None].expand(-1, -1, hidden.shape[-1])
    hidden = final.gather(1, at)
    if context.difference is not None:
        hidden = torch.cat([hidden, hidden + F.pad(context.difference, (0, 0, 0, 1)).gather(1, at)])
    position = network.output_position[0, places.clamp(max=size - 1)]
    return network.decoder_norm(hidden) + position.repeat(len(hidden) // len(places), 1, 1)


def _encode_more(network, tokens, visible, count, class_labels, context, places, seen, first, fed, padded):
    """The encoded first `fed` buffers and the tokens at the first of `places` where `seen` [B, K], which join the
    `first` [B] ones of the encoder's cache."""
    buffers, size, known = network.config.num_buffers, visible.shape[1], seen.shape[1]
    slots = first[:, None] + torch.arange(known, device=places.device)
    slots = torch.where(seen, slots, size).clamp(max=size)
    context.encoder.write_at(_rows(network, slots, fed), buffers + count)
    mask = None
    if padded:
        ends = buffers + visible.sum(1)
        mask = additive(torch.arange(buffers + count, device=places.device) < ends[:, None, None], network.dtype)
    return network.encode(tokens, places[:, :known], mask, class_labels, context.encoder, fed)


def _rows(network, places, fed):
    """The rows [B, fed + Q] of the first `fed` buffers and of `places` [B, Q]."""
    buffers = torch.arange(fed, device=places.device).expand(len(places), -1)
    return torch.cat([buffers, network.config.num_buffers + places], dim=1)
