"""Autoregressive image generation: every model a diffusers-style pipeline, every faster decoding a small object."""

import importlib


__version__ = "0.1.0"

# Names that belong to no family, by module. Those of a family are in its `family.py`. `__init__.pyi` lists all of them
# for editors and type checkers: `make exports` writes it.
_EXPORTS = {
    "AutoPipeline": "auto",
    "AutoregressiveDecoding": "decoding",
    "CollaborativeDecoding": "decoding",
    "ConfidenceDecoding": "decoding",
    "ContinuousSpeculativeDecoding": "decoding",
    "DecodingStats": "pipelines.output",
    "DenoisingHead": "models.denoising_head",
    "DraftTreeDecoding": "decoding",
    "ExactAcceptance": "decoding",
    "FewStepDecoding": "decoding",
    "FlowDecoding": "decoding",
    "FramewiseVQModel": "tokenizers.vq_frames",
    "GroupAcceptance": "decoding",
    "GroupDecoding": "decoding",
    "HaltonDecoding": "decoding",
    "ImagePipelineOutput": "pipelines.output",
    "ImageUpscaler": "tokenizers.upscaler",
    "LazyJacobiDecoding": "decoding",
    "LazyMAR": "decoding",
    "LineCacheDecoding": "decoding",
    "LlamaGenVQModel": "tokenizers.vq_llamagen",
    "MLCache": "decoding",
    "MaskedDecoding": "decoding",
    "NeighbourAcceptance": "decoding",
    "NeighbourModel": "models.neighbours",
    "WindowDrafter": "models.window_drafter",
    "NextScaleDecoding": "decoding",
    "ParallelJacobiDecoding": "decoding",
    "PatchVQModel": "tokenizers.vq_patches",
    "PathJacobiDecoding": "decoding",
    "PathSpeculativeDecoding": "decoding",
    "ReCAP": "decoding",
    "Sampling": "decoding",
    "SpeculativeJacobiDecoding": "decoding",
    "TreeJacobiDecoding": "decoding",
    "VARVQModel": "tokenizers.vq_var",
    "VideoPipelineOutput": "pipelines.output",
    "ZipARDecoding": "decoding",
    "decoding_from_name": "decoding",
    "decoding_names": "decoding",
}


def _exports() -> dict[str, str]:
    """The names of all exports and their modules."""
    from .families import EXPORTS

    return _EXPORTS | EXPORTS


def __getattr__(name: str):
    if name == "__all__":
        return sorted([*_exports(), "__version__"])
    # Other names of this kind are Python's.
    module = None if name.startswith("__") else _EXPORTS.get(name) or _exports().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return __getattr__("__all__")
