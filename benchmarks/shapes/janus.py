"""The published shape of Janus-Pro."""

from transformers import JanusConfig, JanusForConditionalGeneration

from arimage.decoding import Sampling

from . import NARROW, Bind, Bound, Published, build, language_model


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


TINY = {
    "side": 4,
    "vision": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 32},
    "vq": {"base_channels": 32, "channel_multiplier": [1] * 5, "num_res_blocks": 1, "num_embeddings": 64},
    "vocab_size": 64,
    **NARROW,
}
PUBLISHED = {"janus-pro-7b": Published(30, janus_pro_7b, ("ar", "sjd-coupled", "sjd-tree"), TINY)}
