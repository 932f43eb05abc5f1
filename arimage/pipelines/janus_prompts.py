"""The prompts of Janus (https://arxiv.org/abs/2410.13848), to generate images and to ask about images."""

import torch
from PIL import Image
from transformers import JanusForConditionalGeneration, JanusModel, JanusProcessor

from ..tokenizers.tiling import Tiling
from .abilities import EDITING, TOKEN_SAMPLING, Abilities
from .base import ARImagePipeline


class JanusPrompts(ARImagePipeline):
    """The part of `JanusPipeline` that reads prompts, and answers questions about images."""

    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING)
    model_cpu_offload_seq = "model"
    _optional_components = ["processor"]
    _truncates_levels = True

    def __init__(self, model: JanusForConditionalGeneration, processor: JanusProcessor | None = None):
        super().__init__()
        if "boi_token_id" not in (getattr(model.generation_config, "generation_kwargs", None) or {}):
            raise ValueError(
                "generation_config of the model has no boi_token_id in its generation_kwargs: put the id of the "
                "begin-of-image token there, or load the repository with AutoPipeline, since DiffusionPipeline does "
                "not download "
                "model/generation_config.json"
            )
        self.register_modules(model=model, processor=processor)
        self.generation_config["guidance_scale"] = 5.0
        self._tiling = Tiling(self.scale_factor)

    @property
    def parts(self) -> JanusModel:
        """The networks of the model, on their device."""
        return self.on_device(self.model).model

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens in an image."""
        return (self.model.config.vq_config.num_patches,) * 2

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side."""
        return 2 ** (len(self.model.config.vq_config.channel_multiplier) - 1)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.grid[0] * self.scale_factor, self.grid[1] * self.scale_factor)]

    def check_processor(self) -> None:
        if self.processor is None:
            raise ValueError(
                "this pipeline has no processor: give input_ids and attention_mask, or convert the checkpoint again "
                "with "
                "its tokenizer in the folder"
            )

    @property
    def begin_of_image(self) -> int:
        return self.model.generation_config.generation_kwargs["boi_token_id"]

    def encode_prompt(self, prompt: list[str]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] and their mask [B, P], padded on the left, of texts in the model's template."""
        tokenizer = self.processor.tokenizer
        texts = []
        for text in prompt:
            turn = {"role": "user", "content": [{"type": "text", "text": text}]}
            filled = self.processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
            texts.append(tokenizer.bos_token + filled + tokenizer.boi_token)
        encoded = tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        ).to(self._execution_device)
        return encoded.input_ids, encoded.attention_mask

    @torch.no_grad()
    def understand(
        self,
        image: Image.Image | list[Image.Image],
        question: str | list[str],
        **generate_kwargs,
    ) -> list[str]:
        """Answer questions about images.

        Args:
            image, question: one of each, or lists of equal length; a single one is used with each of the others.
            generate_kwargs: of transformers' `generate`, by default `max_new_tokens=512, do_sample=False`.

        Raises:
            ValueError: if the pipeline has no processor, or the lists are of different length.
        """
        self.check_processor()
        images = image if isinstance(image, list) else [image]
        questions = question if isinstance(question, list) else [question]
        count = max(len(images), len(questions))
        if {len(images), len(questions)} - {1, count}:
            raise ValueError(f"{len(images)} images and {len(questions)} questions: give as many, or one for all")
        texts = []
        for text in questions * (count // len(questions)):
            turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
            texts.append(self.processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True))
        inputs = self.processor(
            text=texts,
            images=images * (count // len(images)),
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self._execution_device, self.model.dtype)
        ids = self.model.generate(**inputs, **{"max_new_tokens": 512, "do_sample": False, **generate_kwargs})
        self.maybe_free_model_hooks()
        return self.processor.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
