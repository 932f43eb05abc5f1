"""Language models that torch.compile wrapped."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


@dataclass
class WholeModel:
    """A model of transformers in the place of the decoder inside of it, so that every forward pass calls the whole model.

    Attributes:
        whole: the model, which may be wrapped by `torch.compile`. Its own head computes one position only.
        decoder: the decoder in it.
    """

    whole: nn.Module
    decoder: PreTrainedModel

    @property
    def config(self):
        return self.decoder.config

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.get_input_embeddings()

    def __call__(self, **inputs) -> BaseModelOutput:
        hidden = self.whole(**inputs, output_hidden_states=True, logits_to_keep=1).hidden_states
        return BaseModelOutput(last_hidden_state=hidden[-1])


def decoder_in(component: nn.Module, decoder: PreTrainedModel) -> PreTrainedModel | WholeModel:
    """What to call for a forward pass of the `decoder` inside of a `component`: the decoder itself, or, if `torch.compile`
    wrapped the component, the component, since the decoder knows nothing of the wrapper."""
    if isinstance(component, torch._dynamo.OptimizedModule):
        return WholeModel(component, decoder)
    return decoder
