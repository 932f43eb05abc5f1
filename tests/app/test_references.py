"""Reference images through the engine, the server and the demo: a model that reads them edits without a mask."""

import base64
import io
from contextlib import closing

import numpy as np
import openai
import pytest
from app.server.test_app import serving
from families import seeded
from PIL import Image
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.emu35.tiny import REFERENCES
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.nextstep import tiny as tiny_nextstep

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Refused, Request, seeds_of


WIDE, TALL = REFERENCES


def png(image):
    data = io.BytesIO()
    image.save(data, "png")
    return data.getvalue()


def same(one, other):
    """Images of a batch differ by rounding: a level at most, and that is rounded down."""
    levels, others = (np.asarray(image.convert("RGB")).astype(int) for image in (one, other))
    return levels.shape == others.shape and abs(levels - others).max() <= 1


@pytest.fixture(scope="module")
def pipe():
    return tiny_emu35.pipeline()


@pytest.fixture(scope="module")
def engine(pipe):
    engine = Engine({"reads": pipe, "text": tiny_llamagen.text_pipeline()})
    yield engine
    engine.close()


def expected(pipe, seed=0, count=1, **arguments):
    generator = [seeded(one) for one in seeds_of(seed, count)]
    return pipe("make it blue", **arguments, num_images_per_prompt=count, generator=generator).images


# Engine


def test_images_are_those_of_the_pipeline(engine, pipe):
    request = Request("reads", prompt="make it blue", count=2, seed=3, references=(WIDE, TALL))
    result = engine.submit(request).result(60)
    # The size is the one of the model whose ratio is nearest to that of the last reference.
    assert (result.settings["height"], result.settings["width"]) == (64, 48)
    assert result.settings["guidance_scale"] == 3.0
    images = expected(pipe, 3, 2, image=[WIDE, TALL], height=64, width=48)
    assert all(same(one, other) for one, other in zip(result.images, images, strict=True))
    assert engine.models["reads"].references == 3 and engine.models["text"].references == 0


def test_requests_with_other_references_run_together(engine, pipe):
    asked = [(WIDE,), (TALL, WIDE), (), (WIDE, TALL, WIDE)]
    size = {"height": 64, "width": 64}
    tickets = [engine.submit(Request("reads", prompt="make it blue", seed=7, references=r, **size)) for r in asked]
    for ticket, references in zip(tickets, asked, strict=True):
        given = {"image": list(references)} if references else {}
        assert same(ticket.result(60).images[0], expected(pipe, 7, **given, **size)[0])


def test_continuous_tokens_read_a_reference():
    pipe = tiny_nextstep.pipeline()
    # Edits have a row more than the others.
    pipe.image_guidance_scale = 1.5
    asked = [(WIDE,), (), (TALL,), (WIDE,)]
    with closing(Engine({"reads": pipe})) as engine:
        requests = [
            Request("reads", prompt="make it blue", seed=i, references=r, decoding="sjd-coupled:window=4")
            for i, r in enumerate(asked)
        ]
        for i, ticket in enumerate([engine.submit(request) for request in requests]):
            given = {"image": asked[i][0], "height": 16, "width": 16} if asked[i] else {}
            alone = expected(pipe, i, decoding="sjd-coupled:window=4", **given)
            assert same(ticket.result(60).images[0], alone[0])
        with pytest.raises(Refused, match="1 reference"):
            engine.submit(Request("reads", prompt="a", references=(WIDE, TALL)))


def test_a_mask_and_references_go_together(engine, pipe):
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 32, 64, 64))
    given = Image.effect_noise((64, 64), 60).convert("RGB")
    request = Request("reads", prompt="make it blue", image=given, mask_image=mask, references=(TALL,))
    [image] = engine.submit(request).result(60).images
    options = {"image": given, "mask_image": mask, "image_reference": [TALL], "height": 64, "width": 64}
    assert same(image, expected(pipe, **options)[0])
    assert same(image.crop((0, 0, 64, 32)), given.crop((0, 0, 64, 32)))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("reads", prompt="a", references=(WIDE,) * 4), "takes 3 reference images, not 4: give at most 3"),
        (Request("text", prompt="a", references=(WIDE,)), "takes no reference images, not 1: leave them out"),
        (Request("reads", prompt="a", references=(Image.new("1", (8000, 8000)),)), "image has 8000x8000 pixels"),
    ],
)
def test_too_many_and_too_large_references_are_refused(engine, request_, said):
    with pytest.raises(Refused, match=said) as refused:
        engine.submit(request_)
    assert refused.value.parameter == "image"


# Server


def test_images_without_a_mask_are_references(pipe):
    with serving(Engine({"reads": pipe, "text": tiny_llamagen.text_pipeline()})) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        options = {"prompt": "make it blue", "extra_body": {"seed": 4}, "model": "reads"}

        def edited(**files):
            data = client.images.edit(**files, **options).data[0].b64_json
            return Image.open(io.BytesIO(base64.b64decode(data)))

        files = [("a.png", png(WIDE)), ("b.png", png(TALL))]
        assert same(edited(image=files), expected(pipe, 4, image=[WIDE, TALL], height=64, width=48)[0])
        assert same(edited(image=files[:1]), expected(pipe, 4, image=[WIDE], height=48, width=64)[0])
        # With a mask the first image is edited.
        mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
        mask.paste((0, 0, 0, 0), (0, 32, 64, 64))
        given = Image.effect_noise((64, 64), 60).convert("RGB")
        image = edited(image=[("x.png", png(given)), files[1]], mask=("m.png", png(mask)))
        assert same(image.crop((0, 0, 64, 32)), given.crop((0, 0, 64, 32)))
        assert not same(image, given)
        with pytest.raises(openai.BadRequestError, match="takes 3 reference images, not 4"):
            edited(image=files * 2)
        listed = {model.id: model.model_extra["arimage"]["references"] for model in client.models.list()}
        assert listed == {"reads": 3, "text": 0}


# Demo
