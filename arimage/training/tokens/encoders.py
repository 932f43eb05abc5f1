"""The pipelines whose image tokenizers make tokens."""

from collections.abc import Callable
from pathlib import Path

from ...pipelines.base import ARPipeline
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ...pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from ...pipelines.var.pipeline_var import VARPipeline
from ...pipelines.var.transformer_var import VARTransformer
from ...settings.schema import read_object
from ...tokenizers.vq_var import VARVQModel
from ..tokenizers.tokenizer import TOKENIZERS


# Of a transformer that is not trained.
SMALL = {"hidden_size": 64, "num_layers": 1, "num_attention_heads": 1}


def load_encoder(model: str, load: Callable[[str], ARPipeline], dtype: str = "float32") -> ARPipeline:
    """The pipeline that `load` gives for a name or a folder; for the folder of an image tokenizer of `arimage train
    tokenizer`, a pipeline of classes with this tokenizer and a small random transformer."""
    config = Path(model) / "config.json"
    kind = read_object(config).get("_class_name") if config.is_file() else None
    if kind not in TOKENIZERS:
        return load(model)
    if dtype not in ("auto", "float32"):
        raise ValueError(f"{model} is an image tokenizer, which encodes in float32: leave out --dtype")
    vq = TOKENIZERS[kind].from_pretrained(model)
    given = {"vocab_size": vq.config.codebook_size, **SMALL}
    if isinstance(vq, VARVQModel):
        transformer = VARTransformer(codebook_dim=vq.config.codebook_dim, scales=vq.config.scales, **given)
        return VARPipeline(transformer, vq)
    return LlamaGenPipeline(LlamaGenTransformer(**given), vq)
