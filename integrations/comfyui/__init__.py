"""Nodes for ComfyUI that generate images and videos with autoregressive models, by the package arimage."""

from comfy_api.latest import ComfyExtension

from .nodes import NODES


class ArimageExtension(ComfyExtension):
    async def get_node_list(self):
        return NODES


async def comfy_entrypoint() -> ArimageExtension:
    return ArimageExtension()
