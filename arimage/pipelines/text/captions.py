"""Cleaning of captions for T5 text encoders, as DeepFloyd IF published it and PixArt and LlamaGen trained with it."""

import html
import re
from functools import lru_cache
from urllib.parse import unquote_plus

from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


_DOMAIN = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)"
_FILE_TYPES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63"
    "\uff0d"
)
# Patterns and their replacements, applied in this order.
_BEFORE_HTML = (
    ("<person>", "person"),
    (rf"\b((?:https?:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN}))", ""),
    (rf"\b((?:www:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN}))", ""),
)
_BEFORE_UNESCAPING = (
    (r"@[\w\d]+\b", ""),
    # Chinese and Japanese characters, which the text encoder was not trained on.
    ("[\u31c0-\u4dbf]+", ""),
    ("[\u4dc0-\u9fff]+", ""),
    (f"[{_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"[\S]+\.(?:{_FILE_TYPES})", ""),
    (r"[\"\']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~\)\(\]\[\}\{\|\\/\*]{1,}", " "),
    (r"\s+\.\s+", " "),
)
_AFTER_UNESCAPING = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILE_TYPES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    # The second letter is the Cyrillic x.
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # noqa: RUF001
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
    (r"^[\'\_,\-\:;]", ""),
    (r"[\'\_,\-\:\-\+]$", ""),
    (r"^\.\S+$", ""),
)


def _replace(caption: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in patterns:
        caption = re.sub(pattern, replacement, caption)
    return caption


def _clean_once(caption: str) -> str:
    caption = _replace(unquote_plus(caption).strip().lower(), _BEFORE_HTML)
    # These leave plain text as it is, and take longer to import than to run.
    plain = caption.isascii() and caption.isprintable() and not {"<", "&"} & {*caption}
    if not plain:
        from bs4 import BeautifulSoup

        caption = BeautifulSoup(caption, features="html.parser").text
    caption = _replace(caption, _BEFORE_UNESCAPING)
    if len(re.findall("[-_]", caption)) > 3:
        caption = re.sub("[-_]", " ", caption)
    if not plain:
        import ftfy

        caption = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return _replace(caption, _AFTER_UNESCAPING).strip()


# A training cleans the same captions in every epoch.
@lru_cache(maxsize=2**14)
def clean_caption(caption: str) -> str:
    """A caption in lower case without links, file names, codes, mark-up and odd punctuation."""
    # Twice, as in the original: what the first round leaves may be cleaned by the second.
    return _clean_once(_clean_once(caption))


def caption_for(tokenizer: PreTrainedTokenizerBase, caption: str) -> str:
    """A caption as `tokenizer` gets it: cleaned, but as it is for a tokenizer of whole words, some of which the
    cleaning would leave out ("download", "pdf")."""
    fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    return caption if fast and isinstance(tokenizer.backend_tokenizer.model, WordLevel) else clean_caption(caption)
