"""Tiny decoders of all kinds whose layers take the kernels of a step, and their forward passes."""

import torch
from tiny import randomise
from transformers import (
    ChameleonConfig,
    ChameleonModel,
    Emu3TextConfig,
    Emu3TextModel,
    GlmImageTextConfig,
    GlmImageTextModel,
    LlamaConfig,
    LlamaModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

from arimage.decoding import Layout
from arimage.models.language_heads import CodeHead
from arimage.models.language_model import LanguageTokenModel
from arimage.pipelines.mammothmoda2.transformer_mammothmoda2 import MammothModa2Config, MammothModa2LanguageModel
from arimage.pipelines.x_omni.transformer_x_omni import XOmniConfig, XOmniLanguageModel


SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
VQ = {"embed_dim": 4, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}
HEAD_DIM, CODES, ROW_END, GRID, AXES = {"head_dim": 32}, 40, 7, (6, 8), (1, 1, 2)
AXIAL = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 3, 3],
}
PROMPTS = torch.tensor([[0, 0, 9, 11, 5], [8, 12, 9, 3, 5], [0, 2, 4, 3, 1]])
TWO = {"vocab_size": 50, "gen_vocab_start_index": 50, "gen_vocab_size": 46, "gen_head_start": 48}
DECODERS = {
    "llama": lambda: LlamaModel(LlamaConfig(**SHAPE)),
    "emu3": lambda: Emu3TextModel(Emu3TextConfig(**SHAPE)),
    "qwen2": lambda: Qwen2Model(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**SHAPE, **HEAD_DIM)),
    "chameleon": lambda: ChameleonModel(ChameleonConfig(**SHAPE, vocabulary_map={"<image>": 63}, vq_config=VQ)),
    "glm_image": lambda: GlmImageTextModel(GlmImageTextConfig(**SHAPE, rope_parameters=AXIAL)),
    "mammothmoda2-qwen2": lambda: mammothmoda2("qwen2"),
    "mammothmoda2-qwen3": lambda: mammothmoda2("qwen3"),
    "x_omni": lambda: XOmniLanguageModel(
        XOmniConfig(**SHAPE, num_mm_adap_layers=1, num_mm_head_layers=0, gen_vocab_size=64, num_codes=CODES)
    ),
}


def mammothmoda2(backbone: str) -> MammothModa2LanguageModel:
    ids = {"visual_token_start_id": 54, "row_end_id": 52, "image_end_id": 53}
    shape = SHAPE | TWO | ids | HEAD_DIM
    return MammothModa2LanguageModel(MammothModa2Config(**shape, backbone=backbone, expert_layers=(1, 2)))


def decoder_of(kind: str, dtype: torch.dtype = torch.float32):
    decoder = randomise(DECODERS[kind](), 3)
    for name, value in decoder.named_parameters():
        # Attention that is nearly uniform would not tell what it sees.
        if "q_proj" in name:
            value.data *= 4
    return decoder.requires_grad_(False).to(dtype).eval()


def bind(kind: str, decoder, batch: int, branches: int, row_end: bool) -> LanguageTokenModel:
    rows = PROMPTS[torch.arange(batch * branches) % 3]
    ids = torch.where(torch.arange(batch * branches)[:, None] < batch, rows, rows.flip(0))
    mask = ids > 0
    mask[:, -1] = True
    axes = {}
    if kind == "glm_image":
        offsets = torch.stack([torch.arange(48) * n // 2 for n in AXES])
        axes = {"prompt_positions": torch.arange(5).expand(len(ids), 3, 5), "token_positions": offsets}
    table = decoder.get_input_embeddings()
    lm_head = torch.nn.Linear(SHAPE["hidden_size"], CODES, bias=False).to(table.weight)
    lm_head.weight.data.copy_(torch.randn(lm_head.weight.shape, generator=torch.Generator().manual_seed(5)) / 2)
    return LanguageTokenModel(
        decoder,
        embed=table,
        head=CodeHead(lm_head.requires_grad_(False), 0, CODES),
        layout=Layout(GRID),
        input_ids=ids % table.num_embeddings,
        attention_mask=mask,
        row_end=ROW_END if row_end else None,
        branches=branches,
        **axes,
    )


@torch.no_grad()
def passes(model: LanguageTokenModel, window: int, told: bool = False) -> list[torch.Tensor]:
    """The logits of two forward passes of `window` tokens, of which one is not known and one is padding."""
    batch = len(model.conditions.seen) // model.branches
    cache, _ = model.prefill(batch, 4)
    tokens = torch.arange(batch * window).view(batch, window) * 7 % CODES
    positions = torch.arange(window) + torch.arange(batch)[:, None]
    found = []
    for start in (0, 3):
        at = positions + start
        options = {}
        if window > 2:
            tokens[-1, 1], at[-1, -1] = -1, -1
        if told:
            slots = at.clone()
            slots[0, -1] = model.num_tokens + 1
            seen = torch.arange(model.num_tokens + 4) <= at[..., None]
            seen[0, -1, model.num_tokens + 1] = True
            options = {"slots": slots, "visible": seen}
        logits = model.forward(tokens, at, cache, **options)
        found.append(logits[(at >= 0).expand(model.branches, -1, -1)])
    return [*found, torch.tensor(float(cache.finds_ends))]
