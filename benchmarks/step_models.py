"""Models of published shapes, those of all families, and smaller ones of the same families."""

from functools import partial
from importlib import import_module
from pathlib import Path

import shapes
from shapes import NARROW, Bind, Published, var

from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from arimage.pipelines.var.pipeline_var import VARPipeline
from arimage.pipelines.var.transformer_var import VARTransformer
from arimage.settings.installed import installed_models
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.tokenizers.vq_var import VARVQModel


FOLDERS = sorted(path.stem for path in Path(shapes.__file__).parent.glob("[!_]*.py"))


def emoji_var(layers: int) -> Bind:
    """The packaged model."""
    packaged = installed_models()["emoji-var"]
    shape, tokenizer = (
        {name: value for name, value in part.load_config(packaged / folder).items() if name[0] != "_"}
        for part, folder in ((VARTransformer, "transformer"), (VARVQModel, "vq"))
    )
    del shape["num_layers"]
    return var.var_d30(layers, tokenizer, text=1, **shape)


MODELS: dict[str, Published] = {"emoji-var": Published(6, emoji_var)}
for _folder in FOLDERS:
    MODELS |= import_module(f"shapes.{_folder}").PUBLISHED
# Models of the same families that a CPU builds in a moment.
TINY = {
    name: Published(1, partial(published.build, **published.tiny))
    for name, published in MODELS.items()
    if published.tiny
}


def tiny_llamagen() -> LlamaGenPipeline:
    transformer = LlamaGenTransformer(grid_size=4, num_layers=1, vocab_size=64, **NARROW)
    tokenizer = {name: value for name, value in var.TINY_TOKENIZER.items() if name != "scales"}
    return LlamaGenPipeline(transformer.eval(), LlamaGenVQModel(latent_channels=16, **tokenizer).eval())


def tiny_var() -> VARPipeline:
    return VARPipeline(VARTransformer(num_layers=1, **var.TINY).eval(), VARVQModel(**var.TINY_TOKENIZER).eval())
