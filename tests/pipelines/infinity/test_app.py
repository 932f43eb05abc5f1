"""The engine with a model whose tokens are maps of bits."""

import numpy as np
import pytest
import torch
from pipelines.infinity import tiny as tiny_infinity

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits, Progress, Request


SCALES = 7


@pytest.fixture(scope="module")
def engine():
    engine = Engine({"bits": tiny_infinity.pipeline()}, Limits(images=4))
    yield engine
    engine.close()


def same(one, other):
    return np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1


def test_a_preview_of_each_scale_is_the_image_of_the_maps_so_far(engine):
    pipe, maps = tiny_infinity.pipeline(), []
    pipe(
        "a red heart",
        generator=torch.Generator().manual_seed(3),
        callback_on_step_end=lambda pipe, step, passes, given: maps.append(given["tokens"].clone()) or {},
        callback_on_step_end_tensor_inputs=["tokens"],
    )
    call = pipe.prepare("a red heart")
    with torch.no_grad():
        expected = [(pipe.decode_tokens(call, tokens) / 2 + 0.5).clamp(0, 1)[0] for tokens in maps]
    ticket = engine.submit(Request("bits", prompt="a red heart", seed=3, preview_every=1))
    shown = [event.previews[0] for event in ticket.events() if isinstance(event, Progress) and event.previews]
    assert len(expected) == SCALES and 1 < len(shown) <= SCALES
    for image in shown:
        pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255
        assert min((pixels - each).abs().max() for each in expected) <= 1 / 255
    assert same(shown[-1], ticket.result(60).images[0])
