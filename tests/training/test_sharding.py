"""A model that is divided over processes, here over one, is trained as one that is not."""

import pytest
import torch
from families import EVERY
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training.test_surviving import SETTINGS, interrupt
from training.tokens.test_cache import encode, parquet
from training.tokens.test_task import recipe

from arimage.training.checkpoints import load_checkpoint
from arimage.training.loop import fit
from arimage.training.recipe import TokenRecipe, load_recipe
from arimage.training.tokens.beginning import token_settings
from arimage.training.tokens.cache import TokenCache
from arimage.training.tokens.task import TokenTask


class Layered(torch.nn.Module):
    """Layers in a network that a pipeline would have, here the task itself."""

    def __init__(self, dtype, at=None):
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to(dtype)
        self.network._no_split_modules = ["Linear"]
        self.shown, self.at, self.reported = self.network, at, []

    def loss(self, step):
        if step == self.at:
            interrupt()
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(step)).to(self.network[0].weight.dtype)
        loss = (self.network(x).float() - 1).square().mean()
        return loss, {"loss": loss.detach()}

    def show(self, networks):
        self.shown = networks["network"]

    def report(self, step, out):
        weights = list(self.shown.parameters())
        assert not any(isinstance(weight, DTensor) for weight in weights)
        self.reported.append([weight.clone() for weight in weights])
        return {"loss of report": float(self.shown(torch.ones(1, 4, dtype=weights[0].dtype)).sum())}


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_divided_model_learns_the_same_and_resumes(one_process, tmp_path, dtype):
    whole, divided, first, second = Layered(dtype), Layered(dtype), Layered(dtype, at=7), Layered(dtype)
    fit(whole, SETTINGS, tmp_path / "whole")
    fit(divided, SETTINGS, tmp_path / "divided", sharded=True, report_every_seconds=-1.0)
    assert all(isinstance(weight, DTensor) for weight in divided.network.parameters())
    with pytest.raises(KeyboardInterrupt):
        fit(first, SETTINGS, tmp_path / "cut", sharded=True, checkpoint_every_seconds=-1.0)
    fit(second, SETTINGS, tmp_path / "cut", sharded=True)
    states = [load_checkpoint(tmp_path / name / "checkpoint.pt")["weights"] for name in ("whole", "divided", "cut")]
    for name in ("masters", "averages"):
        for one, other, resumed in zip(*(state[name] for state in states), strict=True):
            assert other.dtype == torch.float32 and torch.equal(other, resumed)
            torch.testing.assert_close(other, one, atol=0 if dtype == torch.float32 else 2e-2, rtol=0)
    assert len(divided.reported) == 21
    for weight, average in zip(divided.shown.parameters(), states[1]["averages"], strict=True):
        assert weight.dtype == dtype and torch.equal(weight, average.to(dtype))


def test_a_language_model_is_divided_by_its_layers_and_learns_the_same(one_process, tmp_path):
    parquet(tmp_path / "a.parquet", range(4), caption=[f"picture {i}" for i in range(4)])
    encode(EVERY["lumina"](), tmp_path / "a.parquet", tmp_path / "tokens", batch_size=2)
    table, tasks = load_recipe(recipe(tmp_path, steps=3), TokenRecipe), []
    for sharded in (False, True):
        pipe = EVERY["lumina"]()
        network = pipe.components[pipe._lora_loadable_modules[0]].requires_grad_(True)
        layers = [module for module in network.modules() if type(module).__name__ in network._no_split_modules]
        task = TokenTask(pipe, TokenCache(tmp_path / "tokens"), token_settings(table), heldout={}, base="x")
        task.fit(tmp_path / f"{sharded}", sharded=sharded)
        assert layers and all(isinstance(layer, FSDPModule) == sharded for layer in layers)
        tasks.append(load_checkpoint(tmp_path / f"{sharded}" / "transformer" / "checkpoint.pt")["weights"]["masters"])
    for one, other in zip(*tasks, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
