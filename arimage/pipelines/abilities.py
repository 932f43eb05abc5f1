"""The abilities of a pipeline, in one place for the command line, the demo, the server and evaluation."""

from dataclasses import dataclass

from ..decoding.contract.models import Kind


TOKEN_SAMPLING = frozenset({"guidance_scale", "guided_tokens", "temperature", "top_k", "top_p", "min_p"})
MASKED_TOKEN_SAMPLING = TOKEN_SAMPLING - {"guided_tokens"}
LATENT_SAMPLING = frozenset({"guidance_scale", "temperature"})
EDITING = frozenset({"image", "mask_image"})


@dataclass(frozen=True)
class Abilities:
    """What the pipelines of a family can do.

    Attributes:
        kind: what the model generates.
        arguments: the arguments of a call that not all families have: those above, `image_reference`,
            `negative_prompt`, `num_frames`, `order`, `prompt_suffix`, `ratio`, `task`, `video`.
        generates_video: whether a call returns videos.
        predicts_groups: whether the model can predict groups of tokens.
        in_maps: whether the tokens of an image are maps from coarse to fine rather than one grid.
        several_grids: whether other grids of tokens come before that of an image, in a call without references.
        max_references: how many reference images a prompt may have: `image` without `mask_image`. 0 for families that
            take none.
        decoder: the arguments of a call that are those of a diffusion decoder, not of the tokens.
    """

    kind: Kind
    arguments: frozenset[str]
    generates_video: bool = False
    predicts_groups: bool = False
    in_maps: bool = False
    several_grids: bool = False
    max_references: int = 0
    decoder: frozenset[str] = frozenset()

    @property
    def decodes_quickly(self) -> bool:
        """Whether tokens are decoded to pixels fast enough for previews: without a diffusion decoder."""
        return not self.decoder

    def accepts(self, argument: str) -> bool:
        """Whether a call takes this argument."""
        return argument in self.arguments | self.decoder
