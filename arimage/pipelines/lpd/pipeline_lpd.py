"""LPD (https://arxiv.org/abs/2507.01957): images of a class, in any order."""

from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_patches import PatchVQModel
from ..kinds.any_order import AnyOrderPipeline
from .family import FAMILY
from .transformer_lpd import LPDTokenModel, LPDTransformer


class LPDPipeline(AnyOrderPipeline):
    """Generates images from a class with LPD.

    Args:
        transformer (`LPDTransformer`): the any-order model.
        vq (`LlamaGenVQModel` or `PatchVQModel`, *optional*): turns its tokens into images. Without it calls return
            tokens.
        id2label (`dict[int, str]`, *optional*): the names of the classes.

    Attributes:
        order: the default order of the tokens.
    """

    family = FAMILY
    _token_model = LPDTokenModel

    def __init__(
        self,
        transformer: LPDTransformer,
        vq: LlamaGenVQModel | PatchVQModel | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        super().__init__(transformer, vq, id2label)
