"""Models of published shapes, bound to the conditions of a call, on PyTorch's default device. `step_cost.py` builds
them on fake CUDA tensors, which need no weights and no memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    ChameleonConfig,
    ChameleonModel,
    Emu3TextConfig,
    Emu3TextModel,
    GlmImageTextConfig,
    GlmImageTextModel,
    JanusConfig,
    JanusForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
)

import arimage
from arimage.decoding import LatentSampling, Layout, Sampling
from arimage.models.denoising_head import DenoisingHead
from arimage.models.language_model import LanguageTokenModel, code_head
from arimage.pipelines.arpg.transformer_arpg import ARPGTokenModel, ARPGTransformer
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTokenModel, CosmosTransformer
from arimage.pipelines.distilled_decoding.transformer_llamagen_dd import LlamaGenDDTransformer
from arimage.pipelines.distilled_decoding.transformer_var_dd import VARDDTransformer
from arimage.pipelines.distilled_decoding.vector_model import DistilledModel
from arimage.pipelines.glm_image.transformer_glm_image import token_positions
from arimage.pipelines.infinity.bsq_infinity import InfinityVQModel
from arimage.pipelines.infinity.scale_model import InfinityScaleModel
from arimage.pipelines.infinity.schedules import SCHEDULES
from arimage.pipelines.infinity.transformer_infinity import InfinityTransformer
from arimage.pipelines.latent_llama.transformer_latent_llama import LatentLlamaModel, LatentLlamaTransformer
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
from arimage.pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer
from arimage.pipelines.lpd.transformer_lpd import LPDTokenModel, LPDTransformer
from arimage.pipelines.mammothmoda2.transformer_mammothmoda2 import (
    MammothModa2Config,
    MammothModa2LanguageModel,
    bind_prompts,
)
from arimage.pipelines.mar.transformer_mar import MARLatentModel, MARTransformer
from arimage.pipelines.randar.transformer_randar import RandARTokenModel, RandARTransformer
from arimage.pipelines.var.pipeline_var import VARPipeline
from arimage.pipelines.var.transformer_var import VARScaleModel, VARTransformer
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.tokenizers.vq_var import VARVQModel


PROMPT = 32
PACKAGED = Path(arimage.__file__).parent / "assets"


class Bound(NamedTuple):
    """A model bound to the images of one call, how its tokens are sampled, how many K/V slots its image has, and the
    networks whose weights count."""

    model: Any
    sampling: Sampling | LatentSampling
    slots: int
    networks: tuple[nn.Module, ...]


Bind = Callable[[int], Bound]


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The module that `make` returns, with weights of `dtype`: fake weights cannot be cast."""
    torch.set_default_dtype(dtype)
    try:
        return make().eval()
    finally:
        torch.set_default_dtype(torch.float32)


def class_condition(batch: int) -> dict[str, torch.Tensor]:
    return {"class_labels": torch.zeros(batch, dtype=torch.long)}


def text_condition(batch: int, length: int, width: int) -> dict[str, torch.Tensor]:
    embeds = torch.zeros(batch, length, width, dtype=torch.bfloat16)
    return {"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(batch, length, dtype=torch.long)}


def llamagen_xl(layers: int, side: int = 16, text: bool = False, codes: int = 16384, **changes) -> Bind:
    shape: dict[str, Any] = {"hidden_size": 1280, "intermediate_size": 3584, "num_attention_heads": 20, **changes}
    drafter = build(lambda: LlamaGenDrafter(**shape))
    denoiser = build(lambda: LlamaGenDenoiser(hidden_size=shape["hidden_size"], num_layers=layers))
    if text:
        shape |= {"conditioning": "text", "num_condition_tokens": 120}
    network = build(lambda: LlamaGenTransformer(grid_size=side, num_layers=layers, vocab_size=codes, **shape))

    def bind(batch: int) -> Bound:
        condition = text_condition(batch, 120, 2048) if text else class_condition(batch)
        parts = {"drafter": drafter, "denoiser": denoiser, "codebook": torch.zeros(codes, 8)}
        model = LlamaGenTokenModel(network, condition, Layout((side, side)), guided=True, **parts)
        return Bound(model, Sampling(guidance_scale=4.0, top_k=2000), side**2, (network, drafter, denoiser))

    return bind


def var_d30(layers: int, tokenizer: dict | None = None, text: int = 0, **changes) -> Bind:
    """`text` is the length of the texts, 0 for classes."""
    shape: dict[str, Any] = {"hidden_size": 1920, "num_attention_heads": 30, **changes}
    network = build(lambda: VARTransformer(num_layers=layers, **shape))
    small = build(lambda: VARTransformer(num_layers=min(layers, 16), **changes))
    vq = build(lambda: VARVQModel(**(tokenizer or {})), torch.float32)

    def bind(batch: int) -> Bound:
        condition = text_condition(batch, text, shape["caption_dim"]) if text else class_condition(batch)
        refiner = VARScaleModel(small, vq, condition, guided=True)
        model = VARScaleModel(network, vq, condition, guided=True, refiner=refiner)
        return Bound(model, Sampling(guidance_scale=2.5, top_k=900, top_p=0.96), model.num_tokens, (network, vq))

    return bind


def emoji_var(layers: int) -> Bind:
    """The packaged model."""
    shape, tokenizer = (
        {name: value for name, value in part.load_config(PACKAGED / "emoji-var" / folder).items() if name[0] != "_"}
        for part, folder in ((VARTransformer, "transformer"), (VARVQModel, "vq"))
    )
    del shape["num_layers"]
    return var_d30(layers, tokenizer, text=1, **shape)


def infinity_2b(layers: int) -> Bind:
    network = build(lambda: InfinityTransformer(num_layers=layers))
    vq = build(InfinityVQModel, torch.float32)

    def bind(batch: int) -> Bound:
        condition = text_condition(2 * batch, PROMPT, 2048)
        condition["unconditional"] = torch.arange(2 * batch) >= batch
        model = InfinityScaleModel(network, vq, condition, SCHEDULES[64, 64], guided=True)
        sampling = Sampling(guidance_scale=3.0, temperature=0.5, top_p=0.97)
        return Bound(model, sampling, sum(model.cells), (network,))

    return bind


def any_order(layers: int, transformer: type, token_model: type) -> Bind:
    network = build(lambda: transformer(num_layers=layers))

    def bind(batch: int) -> Bound:
        layout = Layout((16, 16))
        # The check of an order reads the host.
        layout.order, layout._rank_of = torch.zeros(2, batch, 256, dtype=torch.long)
        model = token_model(network, class_condition(batch), layout, guided=True)
        return Bound(model, Sampling(guidance_scale=4.0), 256, (network,))

    return bind


def language_model(
    decoder: nn.Module,
    embed: Callable,
    head: Callable,
    shape: tuple[int, int],
    batch: int,
    row_end: int | None = None,
) -> LanguageTokenModel:
    return LanguageTokenModel(
        decoder,
        embed=embed,
        head=head,
        layout=Layout(shape),
        input_ids=torch.zeros(2 * batch, PROMPT, dtype=torch.long),
        row_end=row_end,
        groups=2,
    )


def janus_pro_7b(layers: int, side: int = 24, vision: dict | None = None, vq: dict | None = None, **changes) -> Bind:
    width = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, **changes}
    text = {"num_hidden_layers": layers, "vocab_size": 102400, **width}
    images = {"image_token_embed_dim": width["hidden_size"], "projection_dim": width["hidden_size"], **(vq or {})}
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=images)
    janus = build(lambda: JanusForConditionalGeneration(config))

    def bind(batch: int) -> Bound:
        embed, head = janus.prepare_embeddings_for_image_generation, janus.model.generation_head
        model = language_model(janus.model.language_model, embed, head, (side, side), batch)
        return Bound(model, Sampling(guidance_scale=5.0), side**2, (janus,))

    return bind


def chameleon_7b(layers: int, side: int, row_end: int | None) -> Bind:
    width = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": layers, "num_attention_heads": 32}
    # The tokenizer is part of the decoder in transformers, and of no step.
    vq = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
    config = ChameleonConfig(vocab_size=65536, vocabulary_map={"<image>": 8711}, vq_config=vq, **width)
    decoder = build(lambda: ChameleonModel(config))
    head = build(lambda: nn.Linear(4096, 65536, bias=False))

    def bind(batch: int) -> Bound:
        embed = lambda tokens: decoder.embed_tokens(tokens + 4)  # noqa: E731
        model = language_model(decoder, embed, code_head(head, 4, 8192), (side, side), batch, row_end)
        slots = side**2 if row_end is None else side * (side + 1) - 1
        return Bound(model, Sampling(guidance_scale=4.0, top_k=2000), slots, (decoder, head))

    return bind


def emu3_gen(layers: int, side: int = 90, codes: int = 32768, **changes) -> Bind:
    width = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = Emu3TextConfig(vocab_size=151854 + codes, num_hidden_layers=layers, **(width | changes))
    decoder = build(lambda: Emu3TextModel(config))
    head = build(lambda: nn.Linear(config.hidden_size, 151854 + codes, bias=False))

    def bind(batch: int) -> Bound:
        embed = lambda tokens: decoder.embed_tokens(tokens + 151854)  # noqa: E731
        model = language_model(decoder, embed, code_head(head, 151854, codes), (side, side), batch, 151846)
        return Bound(model, Sampling(guidance_scale=3.0, top_k=2048), side * (side + 1) - 1, (decoder, head))

    return bind


def emu35(layers: int, side: int = 64, codes: int = 131072, **changes) -> Bind:
    width = {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(
        vocab_size=151854 + codes, num_hidden_layers=layers, rope_parameters=rope, **(width | changes)
    )
    decoder = build(lambda: Qwen3Model(config))
    head = build(lambda: nn.Linear(config.hidden_size, 151854 + codes, bias=False))

    def bind(batch: int) -> Bound:
        embed = lambda tokens: decoder.embed_tokens(tokens + 151854)  # noqa: E731
        model = language_model(decoder, embed, code_head(head, 151854, codes), (side, side), batch, 151846)
        return Bound(model, Sampling(guidance_scale=5.0, top_k=5120), side * (side + 1) - 1, (decoder, head))

    return bind


def glm_image(layers: int, shape: tuple[int, int] = (32, 32), small: tuple[int, int] = (16, 16), **changes) -> Bind:
    """It has no guidance."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    config = GlmImageTextConfig(num_hidden_layers=layers, **({"rope_parameters": rope} | changes))
    decoder = build(lambda: GlmImageTextModel(config))
    head = build(lambda: nn.Linear(config.hidden_size, config.vision_vocab_size, bias=False))
    layout = Layout(shape, before=[small])

    def bind(batch: int) -> Bound:
        model = LanguageTokenModel(
            decoder,
            embed=decoder.embed_tokens,
            head=code_head(head, 0, config.vision_vocab_size - 128),
            layout=layout,
            input_ids=torch.zeros(batch, PROMPT, dtype=torch.long),
            prompt_positions=torch.arange(PROMPT).expand(batch, 3, PROMPT),
            token_positions=token_positions(layout.grids),
        )
        return Bound(model, Sampling(temperature=0.9, top_p=0.75), layout.num_tokens, (decoder, head))

    return bind


def mammothmoda2(layers: int, side: int = 32, **changes) -> Bind:
    """Preview. The second half of its layers has experts."""
    width = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    shape = {"vocab_size": 152064, "gen_head_start": 152064, "expert_layers": [layers // 2, layers], **width}
    config = MammothModa2Config(backbone="qwen2", num_hidden_layers=layers, **(shape | changes))
    network = build(lambda: MammothModa2LanguageModel(config))

    def bind(batch: int) -> Bound:
        prompts = torch.zeros(2 * batch, PROMPT, dtype=torch.long)
        model = bind_prompts(network, prompts, None, Layout((side, side)), config.num_codes, groups=2)
        return Bound(model, Sampling(guidance_scale=7.0, top_k=2048), side * (side + 1) - 1, (network,))

    return bind


def cosmos(layers: int, text: bool = False, block: int = 1, frame: tuple[int, int] = (40, 64), **changes) -> Bind:
    """The 4B model, which continues a frame; or with the cross-attention to a text of the 5B."""
    shape = {"context_dim": 1024, **changes} if text else changes
    network = build(lambda: CosmosTransformer((5, *frame), num_layers=layers, block_tokens=block, **shape))

    def bind(batch: int) -> Bound:
        given = torch.zeros(batch, 1, *frame, dtype=torch.long)
        embeds = torch.zeros(batch, 512, 1024, dtype=torch.bfloat16) if text else None
        model = CosmosTokenModel(network, Layout((4, *frame)), given, embeds)
        return Bound(model, Sampling(top_p=0.8), model.num_tokens, (network,))

    return bind


def mar_b(layers: int) -> Bind:
    network = build(lambda: MARTransformer(num_layers=layers, num_decoder_layers=layers))
    head = build(lambda: DenoisingHead(num_layers=min(layers, 6)), torch.float32)

    def bind(batch: int) -> Bound:
        labels, layout = class_condition(batch)["class_labels"], Layout((16, 16))
        drafter = MARLatentModel(network, head, labels, layout, guided=True)
        model = MARLatentModel(network, head, labels, layout, guided=True, drafter=drafter)
        sampling = LatentSampling(guidance_scale=2.9, num_inference_steps=4, num_diffusion_steps=4)
        return Bound(model, sampling, 0, (network, head))

    return bind


def latent_llama(layers: int) -> Bind:
    network = build(lambda: LatentLlamaTransformer(num_layers=layers, num_head_layers=min(layers, 6)))

    def bind(batch: int) -> Bound:
        condition, layout = class_condition(batch), Layout((16, 16))
        drafter = LatentLlamaModel(network, condition, layout, guided=True)
        model = LatentLlamaModel(network, condition, layout, guided=True, drafter=drafter)
        return Bound(model, LatentSampling(guidance_scale=2.9, num_diffusion_steps=4), 256, (network,))

    return bind


def llamagen_dd(layers: int) -> Bind:
    student = build(lambda: LlamaGenDDTransformer(num_layers=layers))
    network = build(lambda: LlamaGenTransformer(num_layers=layers))

    def bind(batch: int) -> Bound:
        condition, codebook, layout = class_condition(batch), torch.zeros(16384, 8), Layout((16, 16))
        teacher = LlamaGenTokenModel(network, condition, layout, guided=True, codebook=codebook)
        model = DistilledModel(student, condition, range(257), codebook, layout=layout, teacher=teacher)
        return Bound(model, Sampling(guidance_scale=4.0), 256, (student, network))

    return bind


def var_dd(layers: int) -> Bind:
    student = build(lambda: VARDDTransformer(num_layers=layers))

    def bind(batch: int) -> Bound:
        offsets = [0]
        for side in student.config.scales:
            offsets.append(offsets[-1] + side**2)
        model = DistilledModel(student, class_condition(batch), offsets, torch.zeros(4096, 32))
        return Bound(model, Sampling(), 0, (student,))

    return bind


class Published(NamedTuple):
    """How many layers a model was published with, and how to build it with any number of them."""

    layers: int
    build: Callable[[int], Bind]


MODELS = {
    "llamagen-xl-256": Published(36, llamagen_xl),
    "llamagen-xl-384": Published(36, partial(llamagen_xl, side=24)),
    "llamagen-xl-512": Published(36, partial(llamagen_xl, side=32)),
    "llamagen-t2i-512": Published(36, partial(llamagen_xl, side=32, text=True)),
    "var-d30": Published(30, var_d30),
    "emoji-var": Published(6, emoji_var),
    "infinity-2b": Published(32, infinity_2b),
    "janus-pro-7b": Published(30, janus_pro_7b),
    "lumina-mgpt-7b-768": Published(32, partial(chameleon_7b, side=48, row_end=8803)),
    "anole-7b": Published(32, partial(chameleon_7b, side=32, row_end=None)),
    "emu3-gen": Published(32, emu3_gen),
    "glm-image": Published(40, glm_image),
    "emu3.5-image": Published(64, emu35),
    "mammothmoda2-preview": Published(28, mammothmoda2),
    "cosmos-4b": Published(16, cosmos),
    "cosmos-5b": Published(16, partial(cosmos, text=True)),
    "arpg-l-256": Published(24, partial(any_order, transformer=ARPGTransformer, token_model=ARPGTokenModel)),
    "lpd-l-256": Published(24, partial(any_order, transformer=LPDTransformer, token_model=LPDTokenModel)),
    "randar-l-256": Published(24, partial(any_order, transformer=RandARTransformer, token_model=RandARTokenModel)),
    "mar-b-256": Published(12, mar_b),
    "latent-llama": Published(12, latent_llama),
    "llamagen-dd-b": Published(12, llamagen_dd),
    "var-dd-d16": Published(16, var_dd),
}

_NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_GLM = {
    "rope_parameters": _ROPE,
    "vocab_size": 256,
    "vision_vocab_size": 192,
    "pad_token_id": 0,
    "eos_token_id": 1,
    **_NARROW,
}
_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 32}
_VQ = {"base_channels": 32, "channel_multiplier": [1] * 5, "num_res_blocks": 1, "num_embeddings": 64}
_SCALES = {"scales": (1, 2)}
_TOKENIZER = {"channels": 8, "channel_multipliers": (1, 2), "layers_per_block": 1, "norm_num_groups": 4}
_TOKENIZER |= {"codebook_size": 64, "codebook_dim": 4}
_VAR = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64, "codebook_dim": 4, **_SCALES}
_COSMOS = {"frame": (2, 4), "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, **_NARROW}
# Models of the same families that a CPU builds in a moment.
TINY = {
    "llamagen-xl-384": Published(1, partial(llamagen_xl, side=4, codes=64, **_NARROW)),
    "var-d30": Published(1, partial(var_d30, tokenizer=_TOKENIZER | _SCALES, **_VAR)),
    "janus-pro-7b": Published(1, partial(janus_pro_7b, side=4, vision=_VISION, vq=_VQ, vocab_size=64, **_NARROW)),
    "emu3-gen": Published(1, partial(emu3_gen, side=4, codes=64, num_key_value_heads=1, **_NARROW)),
    "cosmos-4b": Published(1, partial(cosmos, **_COSMOS)),
    "glm-image": Published(1, partial(glm_image, shape=(4, 4), small=(2, 2), num_key_value_heads=1, **_GLM)),
}


def tiny_llamagen() -> LlamaGenPipeline:
    transformer = LlamaGenTransformer(grid_size=4, num_layers=1, vocab_size=64, **_NARROW)
    return LlamaGenPipeline(transformer.eval(), LlamaGenVQModel(latent_channels=16, **_TOKENIZER).eval())


def tiny_var() -> VARPipeline:
    return VARPipeline(VARTransformer(num_layers=1, **_VAR).eval(), VARVQModel(**_TOKENIZER, **_SCALES).eval())
