"""RandAR (https://arxiv.org/abs/2412.01827): images of a class, in any order."""

from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_patches import PatchVQModel
from ..kinds.any_order import AnyOrderPipeline
from .family import FAMILY
from .transformer_randar import RandARTokenModel, RandARTransformer


class RandARPipeline(AnyOrderPipeline):
    """Generates images from a class with RandAR.

    Args:
        transformer (`RandARTransformer`): the any-order model.
        vq (`LlamaGenVQModel` or `PatchVQModel`, *optional*): turns its tokens into images. Without it calls return
            tokens.
        id2label (`dict[int, str]`, *optional*): the names of the classes.

    Attributes:
        order: the default order of the tokens.
    """

    family = FAMILY
    _token_model = RandARTokenModel

    def __init__(
        self,
        transformer: RandARTransformer,
        vq: LlamaGenVQModel | PatchVQModel | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        super().__init__(transformer, vq, id2label)
