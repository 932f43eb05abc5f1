"""What the training of a text-conditional transformer begins with."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from arimage.auto import AutoPipeline
from arimage.cli.options import fast_dtype
from arimage.pipelines.base import ARPipeline
from arimage.training.resuming import digest, of_networks
from arimage.training.tokens.text import new_text_encoder, train_text_tokenizer

from .captioned import ImageCaptions
from .tables import Recipe
from .text import TextSettings, train_text_encoder


@dataclass(frozen=True)
class Beginning:
    """Where the weights of a training come from.

    Attributes:
        start_from: name or folder of a trained pipeline. The transformer begins with its weights where names and
            shapes agree, and its text tokenizer and text encoder are trained further if the encoder's shape is the one
            asked for.
        text: how a fresh text encoder is trained before the transformer; None: only together with it.
        compile: whether to compile the blocks of the transformer.
    """

    start_from: str | Path | None = None
    text: TextSettings | None = None
    compile: bool = False

    @cached_property
    def trained(self) -> ARPipeline | None:
        return None if self.start_from is None else AutoPipeline.from_pretrained(self.start_from, dtype=torch.float32)

    def text_parts(
        self, data: ImageCaptions, vocab_size: int, length: int, config: dict, folder: Path, device: str
    ) -> tuple[PreTrainedTokenizerFast, T5EncoderModel]:
        """Text tokenizer and text encoder, in float32: those of the pipeline `config["start_from"]`, or a
        `T5EncoderModel(T5Config(**config))` and a tokenizer of `vocab_size` tokens that is learned from the captions
        of `data`, at most `length` tokens each; `folder` keeps the run that trains a fresh one."""
        if "start_from" in config:
            pipe = AutoPipeline.from_pretrained(config["start_from"], dtype=torch.float32)
            return pipe.tokenizer, pipe.text_encoder
        trained = {} if self.trained is None else self.trained.components
        encoder = trained.get("text_encoder")
        if encoder is not None and encoder.config.to_dict().items() >= config.items():
            return trained["tokenizer"], encoder
        captions = [caption for variants in data.captions for caption in variants]
        tokenizer = train_text_tokenizer(captions, vocab_size, length)
        encoder = new_text_encoder(tokenizer, config)
        if self.text is not None:
            train_text_encoder(tokenizer, encoder, data, self.text, folder, device)
        return tokenizer, encoder

    def about(self, text_config: dict, text_encoder: T5EncoderModel) -> dict[str, Any]:
        """What says where the weights come from, for the settings of a run."""
        return {
            "start_from": None if self.trained is None else of_networks(self.trained),
            "text_encoder": digest(text_encoder) if "start_from" in text_config else text_config,
            "text_training": None if self.text is None else asdict(self.text),
        }

    def start(
        self,
        transformer: ModelMixin,
        device: str,
        translate: Callable[[nn.Module], dict[str, torch.Tensor]] = nn.Module.state_dict,
    ) -> None:
        """Initialise `transformer` and move it to `device`, in the dtype that is fast there. `translate` gives the
        weights of the trained transformer the names of this one.

        Raises:
            ValueError: if the transformer could take none of the trained weights.
        """
        transformer.init_weights()
        if self.trained is not None:
            ours, theirs = transformer.state_dict(), translate(self.trained.transformer)
            shared = [name for name in ours if name in theirs and theirs[name].shape == ours[name].shape]
            if not dict(transformer.named_parameters()).keys() & set(shared):
                raise ValueError(
                    f"{self.start_from} has a {type(self.trained.transformer).__name__}, whose weights do not fit a "
                    f"{type(transformer).__name__}: start from a model of the same kind and width"
                )
            transformer.load_state_dict(ours | {name: theirs[name] for name in shared})
        nn.Module.to(transformer, device, fast_dtype(device))
        if self.compile:
            transformer.compile_repeated_blocks()


@dataclass(frozen=True)
class Run:
    """The training of a transformer by a recipe.

    Attributes:
        tokenizer: folder of the trained image tokenizer.
        save: saves the pipeline as it is.
    """

    recipe: Recipe
    tokenizer: Path
    data: ImageCaptions
    heldout: ImageCaptions
    out: Path
    device: str
    save: Callable[[ARPipeline], None]
    beginning: Beginning

    @property
    def text_config(self) -> dict:
        return self.recipe.table("text_encoder").model_dump(exclude_unset=True)
