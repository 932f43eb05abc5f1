"""New text tokenizers and text encoders."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel


CaptionLength = Annotated[int, Field(strict=True, ge=2, le=2**10)]
# The 256 bytes and two special tokens are in every vocabulary.
TextVocabulary = Annotated[int, Field(strict=True, ge=258, le=2**17)]


def train_text_tokenizer(captions: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A lower-casing byte-level BPE with T5's special tokens, learned from `captions`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=max_length
    )


def new_text_encoder(tokenizer: PreTrainedTokenizerFast, config: dict) -> T5EncoderModel:
    """A `T5EncoderModel` with random weights for `tokenizer`, with the shape `config` (`T5Config(**config)`)."""
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return T5EncoderModel(T5Config(vocab_size=len(tokenizer), **special, **config))
