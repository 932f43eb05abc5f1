"""The language model of X-Omni (https://arxiv.org/abs/2507.22058): a Qwen2 decoder with a vocabulary, a norm and a
head of their own for the tokens of images, and with layers at both ends that only these pass."""

import torch
from transformers import PreTrainedModel, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from ...models.two_vocabularies import TwoVocabularyModel


# The generation tokens after those of the image tokenizer.
BEGIN, END, SIZE_END = "<SOM>", "<EOM>", "<IMAGE>"


class XOmniConfig(Qwen2Config):
    """The configuration of `XOmniLanguageModel`: that of a Qwen2, and

    Attributes:
        num_mm_adap_layers, num_mm_head_layers: how many of the first and of the last layers only image tokens pass.
        gen_vocab_size: the number of generation tokens, which have the ids from `vocab_size` on.
        num_codes: how many of them, the first, are tokens of an image.
        mm_special_tokens: the names of the tokens after those.
    """

    model_type = "x_omni_language_model"

    num_mm_adap_layers: int = 4
    num_mm_head_layers: int = 4
    gen_vocab_size: int = 16448
    num_codes: int = 16384
    mm_special_tokens: tuple[str, ...] | list[str] = (BEGIN, END, SIZE_END)

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if min(self.num_mm_adap_layers, self.num_mm_head_layers) < 0 or (
            self.num_mm_adap_layers + self.num_mm_head_layers > self.num_hidden_layers
        ):
            raise ValueError(
                f"num_mm_adap_layers is {self.num_mm_adap_layers} and num_mm_head_layers {self.num_mm_head_layers}: "
                f"give at most {self.num_hidden_layers} in all"
            )
        if not 1 <= self.num_codes <= self.gen_vocab_size - len(self.mm_special_tokens):
            raise ValueError(
                f"num_codes is {self.num_codes} and there are {len(self.mm_special_tokens)} mm_special_tokens: give "
                f"{self.gen_vocab_size} in all at most"
            )
        if missing := {BEGIN, SIZE_END} - set(self.mm_special_tokens):
            raise ValueError(f"mm_special_tokens lack {', '.join(sorted(missing))}: give all of the model")

    @property
    def gen_vocab_start_index(self) -> int:
        """The id of the first generation token, image token 0."""
        return self.vocab_size

    def special_id(self, name: str) -> int:
        """The id of a token of `mm_special_tokens`."""
        return self.vocab_size + self.num_codes + list(self.mm_special_tokens).index(name)


class XOmniDecoderLayer(Qwen2DecoderLayer):
    """A layer of a Qwen2. Those at both ends leave text tokens as they are, but other tokens attend to these."""

    def __init__(self, config: XOmniConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        last = config.num_hidden_layers - config.num_mm_head_layers
        self.passes_text = config.num_mm_adap_layers <= layer_idx < last

    def forward(self, hidden: torch.Tensor, text: torch.BoolTensor | None, **attention) -> torch.Tensor:
        """`text`, bool [B, T, 1], says which tokens are text; without it none is."""
        given = hidden
        hidden = hidden + self.self_attn(hidden_states=self.input_layernorm(hidden), **attention)[0]
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden if self.passes_text or text is None else torch.where(text, given, hidden)


# diffusers finds how a component is loaded by the name of a base in its module.
class XOmniLanguageModel(TwoVocabularyModel, PreTrainedModel):
    """The decoder and the head of generation tokens."""

    config: XOmniConfig
    _no_split_modules = ["XOmniDecoderLayer"]

    def __init__(self, config: XOmniConfig):
        super().__init__(config, XOmniDecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding)
        self.text_norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def normed(self, hidden: torch.Tensor, text: torch.BoolTensor | None) -> torch.Tensor:
        normed = self.norm(hidden)
        return normed if text is None else torch.where(text, self.text_norm(hidden), normed)
