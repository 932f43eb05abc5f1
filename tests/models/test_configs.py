"""The configs of our components come from files: every odd value is refused by its name."""

import inspect

import pytest
import torch

import arimage
from arimage import CosmosTransformer, CosmosVideoTokenizer, LlamaGenDrafter, LlamaGenTransformer, VARTransformer
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser


NAMES = """ARPGTransformer CosmosTransformer CosmosVideoTokenizer DenoisingHead FramewiseVQModel LatentLlamaTransformer
LlamaGenDDTransformer LlamaGenDrafter LlamaGenTransformer LlamaGenVQModel LPDTransformer MARTransformer PatchVQModel
RandARTransformer VARDDTransformer VARTransformer VARVQModel"""
COMPONENTS = [LlamaGenDenoiser, *(getattr(arimage, name) for name in NAMES.split())]
ODD = ["x", "", -1, 1.5, float("nan"), float("inf"), 10**10, 10**400, [], [0], [-1, 4], {}, [[[]]], None]


def odd_values(default):
    """Values that no setting with this default may have."""
    if isinstance(default, bool):
        return [*ODD, 0, 1]
    if isinstance(default, tuple):
        return [*(value for value in ODD if value != []), 4, ["x"], [4, True], [4, 1.5], "44"]
    if isinstance(default, float):
        return [*(value for value in ODD if value != 1.5), True]
    return [value for value in [*ODD, True] if default is not None or value is not None]


@pytest.mark.every(3)
@pytest.mark.parametrize("component", COMPONENTS)
def test_an_odd_value_is_refused_by_its_name(component):
    parameters = [*inspect.signature(component.__init__).parameters.values()][1:]
    assert parameters
    for parameter in parameters:
        for value in odd_values(parameter.default):
            if value == 1.5 and parameter.name in ("mlp_ratio", "rope_theta"):
                continue
            if value is None and "None" in str(parameter.annotation):
                continue
            # Classes are rows of a data set.
            if value == 10**10 and parameter.name == "num_classes":
                continue
            with (
                pytest.raises(ValueError, match=rf"^{parameter.name}(\[\d\])? .*: (give|add)") as refusal,
                torch.device("meta"),
            ):
                component(**{parameter.name: value})
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("component", "name", "setting"),
    [
        (LlamaGenTransformer, "num_key_value_heads", {"num_key_value_heads": 5}),
        (LlamaGenDrafter, "num_key_value_heads", {"num_key_value_heads": 5}),
        (CosmosTransformer, "num_key_value_heads", {"num_key_value_heads": 5}),
        (LlamaGenTransformer, "conditioning", {"conditioning": "sound"}),
        (VARTransformer, "conditioning", {"conditioning": "sound"}),
        (VARTransformer, "scales", {"scales": [4]}),
        (CosmosVideoTokenizer, "levels", {"levels": [8, 1]}),
    ],
)
def test_what_does_not_fit_together_is_refused(component, name, setting):
    with pytest.raises(ValueError, match=name), torch.device("meta"):
        component(**setting)
