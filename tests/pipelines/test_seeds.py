"""The seeds that a call returns: each generates its image again alone."""

import pytest
import torch
from families import EVERY, LATENT, condition_of, flat, one_of_each_kind, seeded
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.pipelines.seeds import image_seeds


PROMPTS = ["a red heart", "tree"]


@pytest.fixture(scope="module")
def pipe():
    return tiny_llamagen.text_pipeline()


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_every_image_of_a_call_is_generated_alone_by_its_seed(pipe, batch_size):
    out = pipe(PROMPTS, num_images_per_prompt=2, generator=seeded(7), batch_size=batch_size)
    assert out.seeds[0] == 7 and len(set(out.seeds)) == 4 and all(type(seed) is int for seed in out.seeds)
    for i, seed in enumerate(out.seeds):
        alone = pipe(PROMPTS[i // 2], generator=seeded(seed))
        assert alone.seeds == [seed]
        assert torch.equal(alone.tokens[0], out.tokens[i])


@pytest.mark.parametrize("name", one_of_each_kind(EVERY))
def test_models_of_every_kind_return_seeds(name):
    pipe = EVERY[name]()
    given = LATENT | condition_of(pipe)
    out = pipe(**given, **{pipe.per_prompt: 2}, generator=seeded(3))
    alone = pipe(**given, generator=seeded(out.seeds[1]))
    torch.testing.assert_close(flat(alone.tokens)[0], flat(out.tokens)[1], atol=1e-4, rtol=1e-4)


def test_a_generator_goes_on_where_it_is(pipe):
    generator = seeded(7)
    first, second = (pipe(PROMPTS[0], generator=generator) for _ in range(2))
    assert first.seeds == [7] and second.seeds != [7] and not torch.equal(first.tokens, second.tokens)
    assert torch.equal(pipe(PROMPTS[0], generator=seeded(second.seeds[0])).tokens, second.tokens)
    # As many images in one call or in two: the same stream of seeds.
    assert [*first.seeds, *second.seeds] == pipe(PROMPTS[0], num_images_per_prompt=2, generator=seeded(7)).seeds


def test_each_of_several_generators_and_that_of_torch_give_their_seeds(pipe):
    out = pipe(PROMPTS, generator=[seeded(5), seeded(2**53 + 1)])
    assert out.seeds == [5, 2**53 + 1]
    torch.manual_seed(5)
    assert pipe(PROMPTS, num_images_per_prompt=2).seeds == image_seeds(seeded(5), 4)
    # Without a seed too.
    again = pipe(PROMPTS[0])
    assert torch.equal(pipe(PROMPTS[0], generator=seeded(again.seeds[0])).tokens, again.tokens)
