"""The words of captions: what an icon shows, and the style that its name or its set says."""

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


# Tokens of a caption, the last one included, which ends it.
LENGTH = 8

# Words of a name that say how an icon is drawn, by the word that captions have for them.
STYLES = {
    "filled": ("filled", "fill", "solid"),
    "outlined": ("outlined", "outline", "line", "linear", "stroke"),
    "thin": ("thin",),
    "light": ("light",),
    "bold": ("bold",),
    "sharp": ("sharp",),
    "pixel": (),
}
# Sets all of whose icons are drawn in one way, unless a name says another.
SET_STYLES = {
    "bxs": "filled",
    "feather": "outlined",
    "heroicons-outline": "outlined",
    "heroicons-solid": "filled",
    "icon-park-outline": "outlined",
    "icon-park-solid": "filled",
    "lucide": "outlined",
    "lucide-lab": "outlined",
    "material-symbols-light": "light",
    "memory": "pixel",
    "pixelarticons": "pixel",
    "simple-line-icons": "outlined",
    "tabler": "outlined",
    "uis": "filled",
    "uit": "thin",
}
# What words of a prompt mean.
_SAME = {"filled": "fill|solid", "outlined": "outline|line art"}
_PUNCTUATION = r"[^\w\s]+"
_ARTICLES = r"\b(?:an?|the|of|icons?)\b"


def styles_of(caption: str, name: str, icon_set: str) -> list[str]:
    """The words of style of an icon, in the order of `STYLES`: those of its name that its caption does not have, and
    that of its set. A name that says filled and outlined says nothing."""
    words = set(re.split(r"[-_ ]", name)) - set(caption.split())
    found = [style for style, names in STYLES.items() if words & set(names)]
    if icon_set in SET_STYLES and not found:
        found = [SET_STYLES[icon_set]]
    return [] if {"filled", "outlined"} <= set(found) else found


def word_tokenizer(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words of the captions and of styles. It leaves out punctuation and articles; a
    word that it does not have is `<unk>`."""
    words = sorted({word for caption in captions for word in caption.split()} | set(STYLES))
    vocab = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    same = [normalizers.Replace(Regex(rf"\b(?:{others})\b"), word) for word, others in _SAME.items()]
    left_out = [normalizers.Replace(Regex(pattern), " ") for pattern in (_PUNCTUATION, _ARTICLES)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), *left_out, *same])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **special)
