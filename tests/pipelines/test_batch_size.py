"""`batch_size`: more images than rows, each of them that of its own run."""

import pytest
import torch
from families import BUILD, EVERY, LATENT, PROMPTS, condition_of, conditions_of, flat, one_of_each_kind, seeded
from torch.utils._pytree import tree_leaves

from arimage.decoding import decoding_from_name
from arimage.decoding.run.batch import Batch, Images, run_batch
from arimage.models.language_model import LanguageTokenModel
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel
from arimage.pipelines.var.transformer_var import VARScaleModel


# One of each way to keep what a forward pass returned; the other decodings are slow.
SOME = {"ar", "sjd-coupled", "sjd-tree", "sjd2", "zipar", "eagle", "next-scale", "code", "path-speculative", "mar"}
SOME |= {"halton", "ml-cache", "recap", "few-step", "groups"}


@pytest.fixture(scope="module")
def pipes():
    return {name: build() for name, build in BUILD.items()}


@pytest.fixture(params=one_of_each_kind(BUILD))
def pipe(request, pipes):
    return pipes[request.param]


def part_of(condition, i):
    return {name: values[i : i + 1] if name != "num_frames" else values for name, values in condition.items()}


def seeds(count):
    return [seeded(i) for i in range(count)]


def own_runs(pipe, condition, **options):
    count = len(next(iter(condition.values())))
    return [pipe(**part_of(condition, i), generator=seeded(i), **options) for i in range(count)]


def check(output, own):
    found, expected = flat(output.tokens), torch.cat([flat(one.tokens) for one in own])
    # Untrained heads multiply the rounding of differently shaped products.
    assert (
        torch.allclose(found, expected, atol=1e-2, rtol=1e-3) if found.is_floating_point() else found.equal(expected)
    )
    for accepted, one in zip(output.stats.accepted.T, own, strict=True):
        steps = one.stats.forward_passes
        assert torch.equal(accepted[:steps], one.stats.accepted[:, 0]) and not accepted[steps:].any()


@pytest.mark.every(3)
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "others"])
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_every_image_is_that_of_its_own_run(family, some):
    pipe = EVERY[family]()
    condition = conditions_of(pipe, 3)
    for name in pipe.decoding_names:
        if (name in SOME) != some:
            continue
        own = own_runs(pipe, condition, decoding=name, **LATENT)
        output = pipe(**condition, decoding=name, batch_size=2, generator=seeds(3), **LATENT)
        check(output, own)
        assert not torch.equal(flat(own[0].tokens), flat(own[1].tokens))
        if family in BUILD:
            each = 1.5 * flat(own[0].tokens).shape[1] / output.stats.forward_passes
            assert output.stats.tokens_per_pass == pytest.approx(each)
        assert output.stats.exact == own[0].stats.exact


@pytest.mark.every(2)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_equal_prompts_are_prefilled_once(pipe, scale, monkeypatch):
    condition = {name: [values[0], values[1], values[0]] for name, values in conditions_of(pipe, 7).items()}
    options = {**condition, "num_images_per_prompt": 2, "guidance_scale": scale, "temperature": 3.0, **LATENT}
    model, rows = pipe.prepare(**condition).model, []
    layers = model.transformer.blocks if hasattr(model, "transformer") else model._decoder.layers
    hook = layers[0].register_forward_hook(lambda *call: rows.append(len(tree_leaves(call[-1])[0])))
    whole, slots = (pipe(**options, batch_size=size, generator=seeds(6)) for size in (None, 4))
    hook.remove()
    # Without their words, prompts of different length are different in these.
    lengths = pipe.num_classes is None and type(pipe).__name__ in (
        "JanusPipeline",
        "LlamaGenPipeline",
        "InfinityPipeline",
    )
    assert rows[0] == 2 + (scale > 1) * (2 if lengths else 1)
    for kind in (LanguageTokenModel, LlamaGenTokenModel, VARScaleModel):
        monkeypatch.setattr(kind, "merge_prompts", lambda self, *names: None)
    separate = pipe(**options, generator=seeds(6))
    for output in (whole, slots):
        assert torch.equal(flat(output.tokens), flat(separate.tokens))


def test_a_callback_sees_all_images(pipe):
    seen = []

    def callback(pipe, step, passes, tensors):
        assert step == passes - 1
        seen.append({name: values.clone() for name, values in tensors.items()})

    names = pipe._callback_tensor_inputs
    output = pipe(
        **conditions_of(pipe, 7),
        batch_size=3,
        generator=seeds(7),
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=names,
        **LATENT,
    )
    assert len(seen) == output.stats.forward_passes
    # Of the first three, which begin together.
    decided = torch.stack([tensors["decided"][:3].sum(1) for tensors in seen])
    accepted = output.stats.accepted[:, :3].cumsum(0)
    assert torch.equal(decided[: len(accepted)], accepted)
    assert all(set(tensors) == set(names) and len(tensors["tokens"]) == 7 for tensors in seen)
    # Those that wait have no tokens yet, and decided ones stay.
    assert (seen[0]["tokens"][3:] == -1).all() and not seen[0]["decided"][3:].any() and seen[-1]["decided"].all()
    for before, after in zip(seen, seen[1:], strict=False):
        kept = before["decided"]
        assert (after["decided"] >= kept).all() and (after["tokens"] == before["tokens"])[kept].all()
    tokens = (
        output.tokens if pipe.abilities.in_maps else pipe.prepare(**condition_of(pipe)).layout.to_ranks(output.tokens)
    )
    assert torch.equal(seen[-1]["tokens"], flat(tokens))


def test_an_interrupted_call_returns_what_there_is(pipe):
    condition = conditions_of(pipe, 7)
    options = {**condition, "output_type": "pt", "decoding": pipe.decoding_names[0]}
    whole = pipe(**options, generator=seeds(7))
    passes = whole.stats.forward_passes + 2

    def callback(pipe, step, passes_so_far, tensors):
        pipe._interrupt = passes_so_far == passes

    output = pipe(**options, generator=seeds(7), batch_size=2, callback_on_step_end=callback)
    assert output.stats.forward_passes == passes
    assert torch.equal(flat(output.tokens)[:2], flat(whole.tokens)[:2]) and (flat(output.tokens)[-1] == -1).all()
    assert output.images.shape == whole.images.shape
    torch.testing.assert_close(output.images[:2], whole.images[:2], atol=1e-4, rtol=0)
    assert (output.stats.accepted.sum(0)[2:4] > 0).all() and not output.stats.accepted[:, 4:].any()


def test_logits_that_are_not_finite_name_the_image(pipes):
    pipe = pipes["llamagen-class"]
    embedding = pipe.transformer.class_embedding.weight
    before = embedding[5].clone()
    with torch.no_grad():
        embedding[5] = float("nan")
    try:
        with pytest.raises(ValueError, match=r"images 6 of"):
            pipe(class_labels=[1, 2, 3, 4, 6, 7, 5, 8], batch_size=2, **LATENT)
    finally:
        with torch.no_grad():
            embedding[5] = before


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", ["janus", *(pytest.param(name, marks=pytest.mark.slow) for name in ("emu3", "lumina"))]
)
@pytest.mark.parametrize(("decoding", "longest"), [("sjd-coupled", 0), ("sjd-tree", 2)])
def test_prompts_of_any_length_may_join(pipes, name, decoding, longest):
    """As requests come to a server: each with a model of its own, the longest prompt first or last."""
    pipe, found = pipes[name], {}
    prompts = sorted(PROMPTS[:3], key=len, reverse=longest == 0)
    own = [pipe(prompt, generator=seeded(i), decoding=decoding, **LATENT) for i, prompt in enumerate(prompts)]
    slots, waiting = Batch(decoding_from_name(decoding), 2), list(enumerate(prompts))

    def begin(room, waiting=waiting):
        if not waiting:
            return None
        i, prompt = waiting.pop(0)
        call = pipe.prepare(prompt, generator=seeded(i))
        return Images([i], call.model, call.sampling, call.seeds)

    def keep(rows, slots=slots):
        found.update({slots.names[row]: slots.state.tokens[row].clone() for row in rows})

    with torch.no_grad():
        run_batch(slots, begin, keep, lambda: False)
    for i, one in enumerate(own):
        assert torch.equal(found[i], one.tokens[0].flatten()), i
