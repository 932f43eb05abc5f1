"""The diffusion decoder of MammothModa2 (https://github.com/bytedance/mammothmoda): a Lumina 2 transformer that reads
hidden states of a language model, and those of image tokens through a Q-Former."""

from functools import partial

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.attention import LuminaFeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import TimestepEmbedding, Timesteps, get_1d_rotary_pos_embed
from diffusers.models.normalization import LuminaLayerNormContinuous, RMSNorm
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ...models.mixin import ModelMixin
from ...settings.schema import Count, Epsilon, Flag, Layers, Positive, Width, checked


MAX_REFERENCES = 5
# Frequencies of the time.
NUM_FREQUENCIES = 256
NORM_EPS = 1e-5


class QFormer(nn.Module):
    """Reads sequences of any length through a fixed number of learned queries.

    Args:
        input_size: D, the width of the sequences.
        hidden_size: W, the width of the queries.
        num_heads: attention heads; None for about one per 128 channels.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_queries: int,
        num_layers: int,
        num_heads: int | None = None,
        norm_eps: float = NORM_EPS,
    ):
        super().__init__()
        heads = valid_heads(hidden_size, max(hidden_size // 128, 1) if num_heads is None else num_heads)
        attention = partial(Attention, hidden_size, heads=heads, dim_head=hidden_size // heads, bias=True)
        self.input_proj = nn.Sequential(RMSNorm(input_size, norm_eps), nn.Linear(input_size, hidden_size))
        self.query = nn.Parameter(torch.randn(1, num_queries, hidden_size) * hidden_size**-0.5)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_q1": RMSNorm(hidden_size, norm_eps),
                    "self_attn": attention(),
                    "ln_q2": RMSNorm(hidden_size, norm_eps),
                    "cross_attn": attention(hidden_size),
                    "ln_ffn": RMSNorm(hidden_size, norm_eps),
                    "ffn": LuminaFeedForward(hidden_size, 4 * hidden_size),
                }
            )
            for _ in range(num_layers)
        )

    def forward(self, hidden: torch.Tensor, mask: torch.BoolTensor | None = None) -> torch.Tensor:
        """Queries [B, num_queries, W] that have read sequences [B, I, D] where `mask` [B, I] is true."""
        read, seen = self.input_proj(hidden), None if mask is None else mask[:, None]
        queries = self.query.expand(len(hidden), -1, -1)
        for layer in self.layers:
            queries = queries + layer["self_attn"](layer["ln_q1"](queries))
            queries = queries + layer["cross_attn"](layer["ln_q2"](queries), read, seen)
            queries = queries + layer["ffn"](layer["ln_ffn"](queries))
        return queries


def valid_heads(hidden_size: int, heads: int) -> int:
    """`heads` if they divide `hidden_size`, else the number of heads that divides it and whose width is nearest to 128
    channels, as the authors choose them."""
    if hidden_size % heads == 0:
        return heads
    nearest = max(round(hidden_size / 128), 1)
    divisors = [count for count in range(1, min(hidden_size, 128) + 1) if hidden_size % count == 0]
    return min(divisors, key=lambda count: (abs(count - nearest), -count))


class MammothModa2Transformer2DModel(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Predicts velocities of latents from the hidden states of a prompt and of the tokens of an image. The defaults
    are those of the authors' class.

    Args:
        patch_size (`int`): latent pixels along each side of a patch.
        in_channels (`int`): C, the channels of the latents.
        hidden_size, num_layers, num_attention_heads, num_kv_heads (`int`): the shape of the transformer.
        num_refiner_layers (`int`): layers before it, of latents, of conditions and of reference images each.
        multiple_of (`int`), ffn_dim_multiplier (`float`, *optional*): the width of feed-forward layers.
        axes_dim_rope (`list[int]`): channels of a head that turn with the index, the row and the column of a token.
        text_feat_dim (`int`): D, the width of the hidden states.
        timestep_scale (`float`): what times in [0, 1] are multiplied by.
        num_queries, num_query_layers (`int`), num_query_heads (`int`, *optional*), query_norm_eps (`float`): the shape
            of the Q-Former.
        projects_queries (`bool`): whether the Q-Former has the width of the hidden states, and its output is projected
            together with the text (Preview), or the width of the transformer (Dev).

    Raises:
        ValueError: if the channels of `axes_dim_rope` are not those of a head.
    """

    _no_split_modules = ["Lumina2TransformerBlock"]
    _repeated_blocks = ["Lumina2TransformerBlock"]
    _skip_layerwise_casting_patterns = ["x_embedder", "norm"]

    @register_to_config
    @checked
    def __init__(
        self,
        patch_size: Count = 2,
        in_channels: Count = 16,
        hidden_size: Width = 2304,
        num_layers: Layers = 26,
        num_refiner_layers: Count = 2,
        num_attention_heads: Count = 24,
        num_kv_heads: Count = 8,
        multiple_of: Count = 256,
        ffn_dim_multiplier: Positive | None = None,
        norm_eps: Epsilon = NORM_EPS,
        axes_dim_rope: list[int] | tuple[int, ...] = (32, 32, 32),
        text_feat_dim: Width = 4096,
        timestep_scale: Positive = 1.0,
        num_queries: Count = 128,
        num_query_layers: Count = 2,
        num_query_heads: Count | None = None,
        query_norm_eps: Epsilon = NORM_EPS,
        projects_queries: Flag = False,
    ):
        super().__init__()
        if hidden_size != num_attention_heads * sum(axes_dim_rope):
            raise ValueError(
                f"axes_dim_rope are {list(axes_dim_rope)}: give the channels of a head, {hidden_size} / "
                f"{num_attention_heads}"
            )

        def blocks(count: int, modulation: bool = True) -> nn.ModuleList:
            return nn.ModuleList(
                Lumina2TransformerBlock(
                    hidden_size,
                    num_attention_heads,
                    num_kv_heads,
                    multiple_of,
                    ffn_dim_multiplier,  # pyright: ignore[reportArgumentType] None is its default elsewhere
                    norm_eps,
                    modulation,
                )
                for _ in range(count)
            )

        area, time_size = patch_size**2 * in_channels, min(hidden_size, 1024)
        self.time_proj = Timesteps(NUM_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embedder = TimestepEmbedding(NUM_FREQUENCIES, time_size)
        self.caption_embedder = nn.Sequential(RMSNorm(text_feat_dim, NORM_EPS), nn.Linear(text_feat_dim, hidden_size))
        self.image_embedder = QFormer(
            text_feat_dim,
            text_feat_dim if projects_queries else hidden_size,
            num_queries,
            num_query_layers,
            num_query_heads,
            query_norm_eps,
        )
        self.x_embedder = nn.Linear(area, hidden_size)
        self.ref_image_patch_embedder = nn.Linear(area, hidden_size)
        self.image_index_embedding = nn.Parameter(0.02 * torch.randn(MAX_REFERENCES, hidden_size))
        self.noise_refiner = blocks(num_refiner_layers)
        self.ref_image_refiner = blocks(num_refiner_layers)
        self.context_refiner = blocks(num_refiner_layers, modulation=False)
        self.layers = blocks(num_layers)
        self.norm_out = LuminaLayerNormContinuous(
            hidden_size, time_size, elementwise_affine=False, eps=1e-6, out_dim=area
        )

    def forward(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        text: list[torch.Tensor],
        image: list[torch.Tensor] | None = None,
        reference: list[list[torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Velocities [B, C, h, w], from noise to the image.

        Args:
            latents: [B, C, h, w].
            timestep: times [B] in [0, 1], 0 for noise and 1 for the image.
            text: hidden states [T, D] of the text of each image. The numbers T may differ.
            image: hidden states [I, D] of the tokens of each image; None for a prediction without them.
            reference: latents [C, h', w'] of the reference images of each image.

        Raises:
            ValueError: if an image has more than 5 reference images.
        """
        dtype, size = self.dtype, self.config.patch_size
        scaled = self.config.timestep_scale * timestep.expand(len(latents))
        time = self.timestep_embedder(self.time_proj(scaled).to(dtype))
        captions = self._captions([one.to(dtype) for one in text], image and [one.to(dtype) for one in image])
        references = [[] for _ in text] if reference is None else reference
        if max(map(len, references)) > MAX_REFERENCES:
            raise ValueError(f"an image has more than {MAX_REFERENCES} reference images: give fewer")

        # The index, row and column of each token. A caption lies on the diagonal, each picture at an index of its own.
        at_captions, at_references, at_latents, patches, owners = [], [], [], [], []
        for i, (caption, pictures) in enumerate(zip(captions, references, strict=True)):
            index = len(caption)
            at_captions.append(torch.arange(index, device=latents.device)[:, None].expand(-1, 3))
            for number, picture in enumerate(pictures):
                embedded = self.ref_image_patch_embedder(self._patches(picture.to(dtype)))
                patches.append(embedded + self.image_index_embedding[number])
                rows, columns = (side // size for side in picture.shape[1:])
                at_references.append(grid(index, rows, columns, latents.device))
                owners.append(i)
                index += max(rows, columns)
            at_latents.append(grid(index, latents.shape[2] // size, latents.shape[3] // size, latents.device))

        captions = self._run(self.context_refiner, captions, at_captions)
        noise = [self.x_embedder(self._patches(one)) for one in latents.to(dtype)]
        noise = self._run(self.noise_refiner, noise, at_latents, time)
        if owners:
            patches = self._run(self.ref_image_refiner, patches, at_references, time[owners])
        sequences, places = [], []
        for i, caption in enumerate(captions):
            own = [number for number, owner in enumerate(owners) if owner == i]
            sequences.append(torch.cat([caption, *(patches[number] for number in own), noise[i]]))
            places.append(torch.cat([at_captions[i], *(at_references[number] for number in own), at_latents[i]]))
        sequences = self._run(self.layers, sequences, places, time)
        hidden = self.norm_out(torch.stack([one[-len(noise[0]) :] for one in sequences]), time)
        hidden = hidden.unflatten(2, (size, size, -1)).unflatten(1, (latents.shape[2] // size, -1))
        return hidden.permute(0, 5, 1, 3, 2, 4).reshape(latents.shape)

    def _captions(self, text: list[torch.Tensor], image: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """The condition of each image: its text, then the queries that have read its tokens."""
        queries = [text[0][:0]] * len(text) if image is None else self.image_embedder(*padded(image))
        if self.config.projects_queries:
            return [self.caption_embedder(torch.cat(parts)) for parts in zip(text, queries, strict=True)]
        if image is None:
            return [self.caption_embedder(one) for one in text]
        return [torch.cat([self.caption_embedder(one), own]) for one, own in zip(text, queries, strict=True)]

    def _patches(self, picture: torch.Tensor) -> torch.Tensor:
        """Patches [h * w / patch_size^2, patch_size^2 * C] of latents [C, h, w]."""
        size = self.config.patch_size
        rows = picture.unflatten(2, (-1, size)).unflatten(1, (-1, size))
        return rows.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)

    def _run(
        self, blocks: nn.ModuleList, sequences: list[torch.Tensor], places: list[torch.Tensor], *time: torch.Tensor
    ) -> list[torch.Tensor]:
        """Sequences [n, W] of different lengths, whose tokens are at `places` [n, 3], after `blocks`."""
        hidden, mask = padded(sequences)
        at = pad_sequence(places, batch_first=True)
        turns = [
            get_1d_rotary_pos_embed(channels, at[..., axis].flatten(), freqs_dtype=torch.float64)
            for axis, channels in enumerate(self.config.axes_dim_rope)
        ]
        rotary = torch.cat(turns, dim=-1).unflatten(0, at.shape[:2]).to(torch.complex64)
        for block in blocks:
            hidden = block(hidden, mask, rotary, *time)
        return [row[: len(sequence)] for row, sequence in zip(hidden, sequences, strict=True)]


def padded(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.BoolTensor | None]:
    """Sequences [n, W] as one tensor [B, max n, W], and which tokens are not padding, [B, max n]; None for all."""
    lengths = [len(sequence) for sequence in sequences]
    hidden = pad_sequence(sequences, batch_first=True)
    if min(lengths) == max(lengths):
        return hidden, None
    steps = torch.arange(max(lengths), device=hidden.device)
    return hidden, steps < torch.tensor(lengths, device=hidden.device)[:, None]


def grid(index: int, rows: int, columns: int, device: torch.device) -> torch.LongTensor:
    """The index, row and column of each token of a picture, [rows * columns, 3]."""
    places = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
    return F.pad(places, (1, 0), value=index)
