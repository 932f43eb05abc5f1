"""Forward passes of modulated layers by the kernels of a step are those of their modules."""

from operator import attrgetter

import pytest
import torch
from pipelines.infinity import tiny as tiny_infinity
from pipelines.latent_llama import tiny as tiny_latent_llama
from pipelines.mar import tiny as tiny_mar
from pipelines.var import tiny as tiny_var
from steps import allow_steps, count_layers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import arimage.kernels.step
from arimage.kernels.operation import DEVICES
from arimage.kernels.step import MOST_ROWS
from arimage.models import step
from arimage.models.denoising_head import DenoisingHead


needs_triton = pytest.mark.skipif(not DEVICES, reason="triton is not installed")


def outputs(pipe, name, call):
    """What the component `name` returns in a call of the pipeline, forward pass by forward pass, and the tokens."""
    found = []
    hook = attrgetter(name)(pipe).register_forward_hook(lambda *call: found.append(call[-1]))
    try:
        tokens = pipe(
            **call, generator=torch.Generator().manual_seed(0), num_images_per_prompt=2, output_type="latent"
        ).images
    finally:
        hook.remove()
    return found, tokens


def half_precision(pipe):
    pipe.transformer.to(torch.bfloat16)
    return pipe


VAR = {"class_labels": 3, "guidance_scale": 2.0}
TEXT = {"prompt": "a red heart", "guidance_scale": 2.0}
PRUNED = {"decoding": "next-scale:pruned=0.5"}
CASES = {
    "VAR": (lambda: tiny_var.pipeline("class"), "transformer", VAR),
    "VAR without some cells": (lambda: tiny_var.pipeline("class"), "transformer", VAR | PRUNED),
    "VAR with text": (lambda: tiny_var.pipeline("text"), "transformer", TEXT),
    "Infinity": (tiny_infinity.pipeline, "transformer", TEXT),
    "Infinity without some cells": (tiny_infinity.pipeline, "transformer", TEXT | PRUNED),
    "Infinity in bfloat16": (lambda: half_precision(tiny_infinity.pipeline()), "transformer", TEXT),
    "MAR": (tiny_mar.pipeline, "head", {"class_labels": 1, "guidance_scale": 2.0, "num_diffusion_steps": 3}),
    "latent-llama": (
        tiny_latent_llama.pipeline,
        "transformer.denoising_head",
        {"class_labels": 1, "num_diffusion_steps": 3},
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("most", [MOST_ROWS, 1], ids=["few rows", "many rows"])
@pytest.mark.parametrize("name", CASES)
def test_forward_passes(name, most, monkeypatch):
    build, component, call = CASES[name]
    pipe = build()
    expected, tokens = outputs(pipe, component, call)
    allow_steps(monkeypatch)
    rows = count_layers(monkeypatch)
    monkeypatch.setattr(arimage.kernels.step, "MOST_ROWS", most)
    # Hooks take the layers in torch, but here they only look.
    monkeypatch.setattr(step, "is_hooked", lambda module: False)
    found, again = outputs(pipe, component, call)
    assert rows
    tolerance = 0.06 if name.endswith("bfloat16") else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(again, tokens, rtol=tolerance, atol=tolerance)


class Launches(TorchDispatchMode):
    """The kernels of a step that are launched, in turn."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "arimage":
            self.names.append(operator._schema.name.removeprefix("arimage::step_"))
        return operator(*args, **kwargs or {})


def launches(rows, change=lambda head: None):
    """Of a forward pass of a denoising head of three layers over so many rows on a GPU, where fake tensors are."""
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad(), Launches() as found:
        head = DenoisingHead(condition_dim=128, hidden_size=64, num_layers=3).eval()
        change(head)
        head(torch.zeros(2, rows // 2, 16), torch.zeros(1), torch.zeros(2, rows // 2, 128))
    return found.names


@needs_triton
def test_a_head_layer_takes_two_launches_and_all_modulations_one():
    assert launches(64) == ["modulated"] * 3 + ["modulations"] + ["modulated"] * (2 * 3 + 1)


@needs_triton
@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (74, lambda head: None),
        (2, lambda head: head.train()),
        (2, lambda head: head.register_forward_hook(lambda *_: None)),
        (2, lambda head: head.blocks[1].fc1.register_forward_hook(lambda *_: None)),
    ],
    ids=["many rows", "training", "hook", "hook of a layer"],
)
def test_what_takes_the_layers_in_torch(rows, change):
    assert launches(rows, change) == []
