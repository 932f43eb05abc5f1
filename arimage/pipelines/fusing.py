"""Projections of one input that become one product."""

from ..models.fused import Fused, fused_in, projections
from ..models.quantized import is_quantized
from .adapters.lora import LoraMixin
from .adapters.lora_layers import lora_layers
from .offload import OffloadMixin
from .quantized import token_network


class FuseMixin(LoraMixin, OffloadMixin):
    """Adds `fuse_projections` and `unfuse_projections` to a pipeline."""

    def fuse_projections(self) -> None:
        """Multiply the input of a layer at once by the weights of its queries, keys and values, and by those of its
        gate and up projections, in place of one after another. A step has fewer kernels then, which pays most once it
        is compiled.

        Weights keep their names, and `state_dict`, `save_pretrained` and `to` do what they do otherwise: each weight
        becomes a part of one tensor, which takes no memory of its own. The images are the same up to the rounding of
        other products. A layer whose weights are replaced later, as by offloading layer by layer, is on its own again.
        Pipelines that share the component share this too. Training multiplies by each weight on its own.

        Raises:
            ValueError: if there are adapters that are not fused, hooks move weights (offloading, several devices),
                weights are quantised or divided over devices, or the model has no such projections.
        """
        networks = self._networks()
        if not all(layer.merged for network in networks for layer in lora_layers(network)):
            raise ValueError("there are adapters: call fuse_lora or unload_lora_weights before fuse_projections")
        if self.has_hooks:
            raise ValueError("hooks move the weights: call fuse_projections on a pipeline without offloading")
        if is_quantized(token_network(self)[1]):
            raise ValueError(
                "the weights are quantised to 8 bits, and their projections cannot be fused: leave out "
                "fuse_projections, or load the pipeline again"
            )
        found = [layers for network in networks for layers in projections(network)]
        if not found and not any(map(fused_in, networks)):
            raise ValueError(
                f"{type(self).__name__} has no projections of their own to fuse: leave out fuse_projections"
            )
        for layers in found:
            Fused(layers)

    def unfuse_projections(self) -> None:
        """Undo `fuse_projections`: each weight has its own memory again, with the same values."""
        for network in self._networks():
            for fused in fused_in(network):
                fused.take_apart()

    def _networks(self) -> list:
        return [self._bare(key) for key in self._lora_loadable_modules if self._bare(key) is not None]
