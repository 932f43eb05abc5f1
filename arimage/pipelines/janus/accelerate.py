"""`arimage.accelerate`: a loaded model of transformers whose own `generate` makes images with the decodings of this
library."""

from functools import wraps
from types import MethodType
from typing import Any

import torch
from transformers import (
    JanusForConditionalGeneration,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...decoding import Decoding
from .pipeline_janus import JanusPipeline


# What transformers may do to the logits, and the setting of a pipeline that does the same.
WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def accelerate(
    model: JanusForConditionalGeneration, decoding: Decoding | str = "sjd-coupled"
) -> JanusForConditionalGeneration:
    """Let `model.generate(..., generation_mode="image")` decode with `decoding`.

    The method is replaced on this object only, and `del model.generate` restores it. Text is generated as before.
    Images take the arguments of transformers that choose the distribution of a token: `guidance_scale` (by default 5),
    `do_sample`, `temperature`, `top_k` (by default 50, as in transformers), `top_p`, `min_p`; and
    `num_return_sequences`, `generation_config`, and a `generator` or list of generators, one per image. The result is
    that of transformers, token ids [B, N]. With an exact decoding they have the same distribution, and the same values
    with `do_sample=False` in float32.

    Args:
        model: a loaded Janus or Janus-Pro of transformers.
        decoding: a decoding or its name.

    Returns:
        `model` itself.

    Raises:
        ValueError: if `model` is not Janus; by the new `generate`, if an argument is not supported.
    """
    if not isinstance(model, JanusForConditionalGeneration):
        raise ValueError(
            f"{type(model).__name__} cannot be accelerated in place: only Janus generates images in its own generate. "
            "Pass a loaded model to its pipeline, as in Emu3Pipeline(model, tokenizer)"
        )
    JanusPipeline(model, None).decoding = decoding

    @wraps(JanusForConditionalGeneration.generate)
    def generate(self, inputs=None, attention_mask=None, logits_processor=None, **kwargs):
        if kwargs.get("generation_mode", "text") != "image":
            return type(self).generate(
                self, inputs, attention_mask=attention_mask, logits_processor=logits_processor, **kwargs
            )
        return _generate_image(self, decoding, inputs, attention_mask, logits_processor, kwargs)

    model.generate = MethodType(generate, model)
    return model


def _generate_image(model, decoding, inputs, attention_mask, logits_processor, kwargs) -> torch.LongTensor:
    del kwargs["generation_mode"]
    generator = kwargs.pop("generator", None)
    ids = kwargs.pop("input_ids", None) if inputs is None else inputs
    config, others = model._prepare_generation_config(kwargs.pop("generation_config", None), **kwargs)
    # Callers name what they do not use, such as streamer=None.
    others = {name: value for name, value in others.items() if value is not None}
    for name in ("return_dict_in_generate", "output_scores", "output_logits"):
        if getattr(config, name):
            others[name] = True
    if config.num_beams not in (None, 1):
        others["num_beams"] = config.num_beams
    if others:
        raise ValueError(f"images of an accelerated model do not support {', '.join(sorted(others))}: leave it out")
    # Janus applies guidance itself, before these.
    guidance, config.guidance_scale = config.guidance_scale, None
    steps = model._get_logits_processor(
        config, input_ids_seq_length=0, encoder_input_ids=ids, logits_processor=logits_processor
    )
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for step in steps:
        name = WARPERS.get(type(step))
        if name is None:
            raise ValueError(f"images of an accelerated model do not support {type(step).__name__}: leave it out")
        settings[name] = getattr(step, name)
    if not config.do_sample:
        settings = {"top_k": 1}
    pipe = JanusPipeline(model, None)
    pipe.set_progress_bar_config(disable=True)
    images: Any = pipe(
        input_ids=ids,
        attention_mask=attention_mask,
        guidance_scale=5.0 if guidance is None else guidance,
        **settings,
        num_images_per_prompt=config.num_return_sequences,
        generator=generator,
        decoding=decoding,
        output_type="latent",
    )
    return images.tokens.flatten(1)
