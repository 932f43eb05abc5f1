"""Training of a text encoder on captions and pictures alone, before a transformer learns with it."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from arimage.pipelines.kinds.class_or_text import last_state
from arimage.pipelines.text.captions import caption_for
from arimage.settings.schema import COMPLETE, Batch, Seed, Share, Side
from arimage.training.data.pictures import to_unit_range
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.processes import batch_generator
from arimage.training.resuming import of_data, of_settings

from .captioned import ImageCaptions
from .sentences import sample_captions


@dataclass(frozen=True)
class TextSettings:
    """How a text encoder is trained before the transformer: captions are distinguished from those of the other
    pictures of a batch, and pictures from theirs (CLIP, https://arxiv.org/abs/2103.00020). Pictures, or the frames of
    clips, are reduced to `picture_size` pixels along each side. `primary_share` and `framed_share` are those of
    `CaptionSettings`."""

    optimizer: OptimizerSettings
    batch_size: Batch = 256
    primary_share: Share = 0.5
    framed_share: Share = 0.0
    picture_size: Side = 16
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


class TextTask(nn.Module):
    """Teaches `text_encoder` to bring the state of a caption's last token near the features of its picture."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text_encoder: T5EncoderModel,
        data: ImageCaptions,
        settings: TextSettings,
    ):
        super().__init__()
        self.text_encoder, self.settings, self.data, self.tokenizer = text_encoder, settings, data, tokenizer
        self.captions = [[caption_for(tokenizer, text) for text in variants] for variants in data.captions]
        width, size = text_encoder.config.d_model, settings.picture_size
        # [M, 3, S, S], or the frames of clips, [M, T, 3, S, S].
        frames = data.images.flatten(0, -4).split(256)
        pooled = torch.cat([F.adaptive_avg_pool2d(to_unit_range(some), size) for some in frames])
        self.pictures = pooled.reshape(len(data), -1)
        self.picture_projection = nn.Sequential(
            nn.Linear(self.pictures.shape[1], 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.5))

    def text_features(self, captions: list[str]) -> torch.Tensor:
        """Unit vectors [B, D]."""
        text = self.tokenizer(captions, padding=True, truncation=True, return_tensors="pt")
        text = text.to(self.text_encoder.device)
        hidden = self.text_encoder(text.input_ids, attention_mask=text.attention_mask).last_hidden_state
        return F.normalize(last_state(hidden, text.attention_mask)[0][:, 0].float(), dim=-1)

    def picture_features(self, index: torch.LongTensor) -> torch.Tensor:
        """Unit vectors [B, D]."""
        pictures = self.pictures[index].to(self.text_encoder.device, self.text_encoder.dtype)
        return F.normalize(self.picture_projection(pictures).float(), dim=-1)

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = self.settings
        generator = batch_generator(settings.seed, step)
        index = self.data.sample(settings.batch_size, generator)
        captions = sample_captions(
            self.captions, index, generator, primary_share=settings.primary_share, framed_share=settings.framed_share
        )
        scores = self.log_scale.exp() * self.text_features(captions) @ self.picture_features(index).T
        # Two rows of a batch may be the same picture.
        twice = (index[:, None] == index).fill_diagonal_(False).to(scores.device)
        scores, right = scores.masked_fill(twice, float("-inf")), torch.arange(len(index), device=scores.device)
        loss = (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2
        return loss, {"loss": loss.detach(), "retrieved": (scores.argmax(-1) == right).float().mean()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        return {}


def train_text_encoder(
    tokenizer: PreTrainedTokenizerFast,
    text_encoder: T5EncoderModel,
    data: ImageCaptions,
    settings: TextSettings,
    out: str | Path,
    device: str = "cpu",
) -> None:
    """Train `text_encoder` in place to tell the captions of `data` apart; `out` keeps checkpoint and log, and a second
    call resumes."""
    # A transformer may have been trained with this encoder: more steps would be another one.
    about = {
        **of_settings(settings),
        "steps": settings.optimizer.steps,
        "model": text_encoder.config.to_diff_dict(),
        "data": of_data(data),
    }
    task = TextTask(tokenizer, text_encoder, data, settings).to(device)
    fit(task, settings.optimizer, out, about=about, seed=settings.seed)
