"""From the weights of an adapter's file to those of the layers of a component, and what they must be."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...models.original_names import rename
from .lora_files import module_of
from .lora_settings import PeftSettings


_KEY = re.compile(
    r"(.+)\.(lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|lora_magnitude_vector(?:\.weight)?|alpha)"
)
_SPLIT = re.compile(r"(.+)\.([qkv])_proj")
_A, _B, _BIAS, _ALPHA = "lora_A.weight", "lora_B.weight", "lora_B.bias", "alpha"
_EMBEDDING = "lora_embedding_A", "lora_embedding_B"
_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d

# As in the settings.
MAX_ALPHA = 1e9

Layers = dict[str, dict[str, torch.Tensor]]


@dataclass
class Adapter:
    """The weights of an adapter of one component, by layer and by peft's name of the part, and its settings. The scale
    of a layer is alpha / rank, or alpha / sqrt(rank) with `use_rslora`; `captions` are what it was trained on."""

    layers: Layers
    alphas: dict[str, float]
    use_rslora: bool = False
    captions: list[str] = field(default_factory=list)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {f"{name}.{part}": value for name, parts in self.layers.items() for part, value in parts.items()}

    @property
    def ranks(self) -> dict[str, int]:
        return {name: rank_of(parts) for name, parts in self.layers.items()}

    @property
    def scales(self) -> dict[str, float]:
        return {name: self.alphas[name] / self.divisor(rank) for name, rank in self.ranks.items()}

    @property
    def uses_dora(self) -> bool:
        return any(part.startswith("lora_magnitude_vector") for parts in self.layers.values() for part in parts)

    @property
    def has_bias(self) -> bool:
        return any(_BIAS in parts for parts in self.layers.values())

    def divisor(self, rank: int) -> float:
        """What alpha is divided by."""
        return math.sqrt(rank) if self.use_rslora else rank

    def config(self, ranks: dict[str, int] | None = None) -> Any:
        """The `LoraConfig` of layers with these ranks, by default those of the weights, and with the same scales. The
        layers begin as peft's plain initialisation leaves them, which does not change the model."""
        from peft import LoraConfig

        own = self.ranks
        ranks = own if ranks is None else ranks
        # Layers that the adapter leaves as they are have any alpha.
        alphas = {
            name: self.alphas[name] * (self.divisor(rank) / self.divisor(own[name])) if name in own else float(rank)
            for name, rank in ranks.items()
        }
        r = Counter(ranks.values()).most_common(1)[0][0]
        alpha = Counter(alphas.values()).most_common(1)[0][0]
        return LoraConfig(
            r=r,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
            target_modules=sorted(ranks),
            rank_pattern={f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != r},
            alpha_pattern={f"^{re.escape(name)}": its for name, its in alphas.items() if its != alpha},
            use_rslora=self.use_rslora,
            use_dora=self.uses_dora,
            lora_bias=self.has_bias,
            inference_mode=True,
        )


def rank_of(parts: dict[str, torch.Tensor]) -> int:
    """The rank of a layer, by whichever part it has."""
    first, second = (parts.get(_A, parts.get(_EMBEDDING[0])), parts.get(_B, parts.get(_EMBEDDING[1])))
    if first is not None and first.ndim:
        return len(first)
    return second.shape[1] if second is not None and second.ndim > 1 else 0


def adapter_for(
    component: nn.Module, state: dict[str, torch.Tensor], settings: PeftSettings | None, source: str
) -> Adapter:
    """The adapter of a component, with all of its layers by the names and the shapes that they have here, from weights
    by LAYER.PART and, in files of some programs, LAYER.alpha. Without settings and alpha the scale is 1."""
    layers: Layers = {}
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(
                f"{source} has the key {key}, which is not a weight of a LoRA: give one with lora_A and lora_B, or "
                "lora_down, lora_up and alpha"
            )
        _check_values(source, key, value, match[2] == _ALPHA)
        layers.setdefault(match[1], {})[match[2]] = value
    alphas = _alphas(source, layers, settings)
    adapter = Adapter(layers, alphas, settings is not None and settings.use_rslora)
    _to_own_layers(source, adapter, component, settings)
    for name, parts in adapter.layers.items():
        _check_layer(source, name, parts, component, adapter)
    stated = {} if settings is None else {"use_dora": settings.use_dora, "lora_bias": settings.lora_bias}
    for name, found in {"use_dora": adapter.uses_dora, "lora_bias": adapter.has_bias}.items():
        if stated.get(name) not in (None, found):
            raise ValueError(
                f"{source}: {name} is {stated[name]}, and its weights say {found}: save the adapter again"
            )
    return adapter


def _check_values(source: str, key: str, value: Any, is_alpha: bool) -> None:
    numbers = isinstance(value, torch.Tensor) and (value.is_floating_point() or is_alpha and not value.is_complex())
    if not numbers:
        raise ValueError(f"{source} has {key} of {getattr(value, 'dtype', type(value))}: give a tensor of floats")
    if is_alpha and (value.numel() != 1 or not 0 < float(value) <= MAX_ALPHA):
        raise ValueError(f"{source} has {key} of the shape {list(value.shape)}: give one number above 0")
    # Not all dtypes have `isfinite`.
    if not torch.isfinite(value.float()).all():
        raise ValueError(f"{source} has {key}, which is not finite: its training diverged, give another adapter")


def _alphas(source: str, layers: Layers, settings: PeftSettings | None) -> dict[str, float]:
    """Alpha of each layer. Takes LAYER.alpha out of `layers`."""
    given: dict[str, float] = {}
    for name, parts in layers.items():
        if _ALPHA in parts:
            given[name] = float(parts.pop(_ALPHA))
    if given and given.keys() != layers.keys():
        missing = next(name for name in layers if name not in given)
        raise ValueError(f"{source} has alpha for some layers and not for {missing}: give an adapter with all of them")
    ranks = {name: rank_of(parts) for name, parts in layers.items()}
    if settings is None:
        return given or {name: float(rank) for name, rank in ranks.items()}
    alphas = {name: settings.alpha_of(name) for name in layers}
    for name, rank in ranks.items():
        if settings.rank_of(name) != rank:
            raise ValueError(
                f"{source}: r is {settings.rank_of(name)} for {name}, whose weights have the rank {rank}: save the "
                "adapter again"
            )
        if name in given and given[name] != alphas[name]:
            raise ValueError(
                f"{source}: lora_alpha is {alphas[name]:g} for {name}, and {name}.alpha is {given[name]:g}: leave "
                "one out"
            )
    return alphas


def _to_own_layers(source: str, adapter: Adapter, component: nn.Module, settings: PeftSettings | None) -> None:
    """Name the layers of an adapter as `component` does, from the names of its authors, or from split projections."""
    pairs = getattr(component, "original_names", ())
    ours = {rename(f"{name}.", pairs): name for name, _ in component.named_modules()}
    names = {name: ours.get(f"{name}.", name) for name in adapter.layers}
    before = set(names)
    for name, count in Counter(names.values()).items():
        if count > 1:
            raise ValueError(f"{source} has {name} twice, also by another name: give an adapter with one of them")
    adapter.layers = {names[name]: parts for name, parts in adapter.layers.items()}
    adapter.alphas = {names[name]: alpha for name, alpha in adapter.alphas.items()}
    splits: dict[str, dict[str, str]] = {}
    for name in adapter.layers:
        match = _SPLIT.fullmatch(name)
        if match is not None and module_of(component, f"{match[1]}.qkv_proj") is not None:
            splits.setdefault(match[1], {})[match[2]] = name
    for name, parts in splits.items():
        _fuse_split_projections(source, adapter, name, parts)
    if before != set(adapter.layers) and settings is not None and (settings.rank_pattern or settings.alpha_pattern):
        raise ValueError(
            f"{source} has rank_pattern or alpha_pattern for layers that have other names here: train it with one "
            "rank and one alpha"
        )


def _fuse_split_projections(source: str, adapter: Adapter, name: str, parts: dict[str, str]) -> None:
    """Make one adapter of `qkv_proj` of those of `q_proj`, `k_proj` and `v_proj`: A of rank r each becomes one of the
    rank 3 r, and B is block-diagonal."""
    scales = adapter.scales if all(adapter.ranks.values()) else {}
    each = [adapter.layers.pop(parts[part]) for part in "qkv" if part in parts]
    if (
        not scales
        or len(each) != 3
        or any(its.keys() != {_A, _B} or its[_A].ndim != 2 or its[_B].ndim != 2 for its in each)
    ):
        raise ValueError(
            f"{source} has {', '.join(f'{part}_proj' for part in parts)} of {name}, whose q_proj, k_proj and v_proj "
            "are one layer here: train it on all three, with lora_A and lora_B alone"
        )
    if len({scales.get(one) for one in parts.values()}) != 1:
        raise ValueError(
            f"{source} has another alpha for each of {', '.join(parts.values())}: train it with one alpha"
        )
    if (fused := f"{name}.qkv_proj") in adapter.layers:
        raise ValueError(f"{source} has {fused} twice, also split: give an adapter with one of them")
    a, b = (torch.cat([its[_A] for its in each]), torch.block_diag(*(its[_B] for its in each)))
    alpha = scales[parts["q"]] * adapter.divisor(len(a))
    for one in parts.values():
        del adapter.alphas[one]
    adapter.layers[fused], adapter.alphas[fused] = {_A: a, _B: b}, alpha


def _check_layer(
    source: str, name: str, parts: dict[str, torch.Tensor], component: nn.Module, adapter: Adapter
) -> None:
    kind, module = type(component).__name__, module_of(component, name)
    if module is None:
        raise ValueError(
            f"{source} has the key {name}.{next(iter(parts), _ALPHA)}, and this {kind} has no such layer: give an "
            "adapter that was trained for it"
        )
    shapes = _shapes(module, rank_of(parts))
    if shapes is None:
        raise ValueError(f"{source} adapts {name}, a {type(module).__name__}, which takes no adapters: leave it out")
    linear = _A in shapes and not isinstance(module, _CONVOLUTIONS)
    if adapter.has_bias:
        shapes[_BIAS] = shapes[_B][:1] if _B in shapes else ()
    magnitude = next((part for part in parts if part.startswith("lora_magnitude_vector")), "lora_magnitude_vector")
    if adapter.uses_dora:
        if not linear:
            raise ValueError(f"{source} has use_dora, and adapts {name}, which is not a linear layer: leave it out")
        shapes[magnitude] = shapes[_B][:1]
    for part in shapes:
        if part not in parts:
            raise ValueError(f"{source} has {name}.{next(iter(parts), _ALPHA)} without {name}.{part}: save it again")
    for part, value in parts.items():
        if part not in shapes:
            raise ValueError(
                f"{source} has the key {name}.{part}, and {name} is a {type(module).__name__}: give an adapter with "
                f"{' and '.join(shapes)}"
            )
        if value.shape != shapes[part]:
            raise ValueError(
                f"{source} has {name}.{part} of the shape {list(value.shape)}, where this {kind} needs "
                f"{list(shapes[part])}: give an adapter that was trained for it"
            )


def _shapes(module: nn.Module, rank: int) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the parts of an adapter of a layer; None if it takes none."""
    rank = max(rank, 1)
    if isinstance(module, nn.Embedding):
        return {_EMBEDDING[0]: (rank, module.num_embeddings), _EMBEDDING[1]: (module.embedding_dim, rank)}
    if isinstance(module, _CONVOLUTIONS):
        # peft builds A without dilation and with zeros around the image, and cannot fuse groups.
        if module.groups != 1 or set(module.dilation) != {1} or module.padding_mode != "zeros":
            return None
        kernel = tuple(module.kernel_size)
        return {_A: (rank, module.in_channels, *kernel), _B: (module.out_channels, rank, *(1 for _ in kernel))}
    # Quantised layers need not be `nn.Linear`.
    if isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features")):
        return {_A: (rank, module.in_features), _B: (module.out_features, rank)}
    return None
