"""Every decoding on every family on fake CUDA tensors: a step stays on the device, and writes its state in place."""

import dataclasses
from functools import cache
from weakref import WeakKeyDictionary

import any_order
import pytest
import step_models
import tiny
import torch
from models.test_fake_cuda import BATCH, LAYOUT, built, condition_of, config_of, cosmos, mammothmoda2, ordered_layout
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.infinity import tiny as tiny_infinity
from pipelines.infinitystar import tiny as tiny_infinitystar
from pipelines.janus import tiny as tiny_janus
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from presets import FOR_ANY_ORDER, FOR_GRIDS, FOR_SCALES, FOR_TOKENS
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    ChameleonConfig,
    ChameleonModel,
    Emu3TextConfig,
    Emu3TextModel,
    JanusConfig,
    Qwen3Config,
    Qwen3Model,
)
from transformers import JanusForConditionalGeneration as Janus

from arimage.decoding import (
    GroupDecoding,
    Sampling,
    acceptance,
    decoding_from_name,
    decoding_from_text,
    parse_decoding,
)
from arimage.decoding.jacobi import speculative_jacobi
from arimage.decoding.names import PRESETS
from arimage.models.conditions import with_unconditional
from arimage.models.language_heads import CodeHead
from arimage.models.language_model import LanguageTokenModel
from arimage.models.neighbours import NeighbourModel
from arimage.pipelines.infinity.bsq_infinity import InfinityVQModel
from arimage.pipelines.infinity.scale_model import InfinityScaleModel
from arimage.pipelines.infinity.schedules import SCHEDULES
from arimage.pipelines.infinity.transformer_infinity import InfinityTransformer
from arimage.pipelines.infinitystar.scale_model import InfinityStarScaleModel
from arimage.pipelines.infinitystar.schedules import Repetitions, passes
from arimage.pipelines.infinitystar.transformer_infinitystar import InfinityStarTransformer
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
from arimage.pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer
from arimage.pipelines.var.transformer_var import VARScaleModel, VARTransformer
from arimage.tokenizers.vq_var import VARVQModel


STEPS = 2
MODE = FakeTensorMode()
EVERYTHING = {"guidance_scale": 3.0, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05}


class DeviceOnly(TorchDispatchMode):
    """Raises AssertionError where an operator has a tensor on the CPU, which it copies or waits for. A read of a value
    raises DataDependentOutputException, and a shape that depends on one DynamicOutputShapeException, since fake
    tensors have no values."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        if operator.namespace != "prim":
            tensors = (leaf for leaf in tree_leaves((args, kwargs, results)) if isinstance(leaf, torch.Tensor))
            assert all(tensor.is_cuda for tensor in tensors), f"{operator} has a tensor on the CPU"
        return results


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch):
    # A table of neighbours is checked against the codebook in `start`, which reads it.
    monkeypatch.setattr(acceptance, "_tables", WeakKeyDictionary())
    with MODE, torch.device("cuda"), torch.no_grad():
        yield


# Neighbours of a text, and of a class.
NEIGHBOURS = {
    "text": lambda: NeighbourModel(tiny.CODES, rank=8),
    "class": lambda: tiny_llamagen.window_drafter(tiny_llamagen.transformer("class")),
}


@cache
def llamagen_parts(kind, dtype):
    config = config_of(lambda: tiny_llamagen.transformer(kind, num_layers=1))
    drafter_config = config_of(lambda: tiny_llamagen.drafter(tiny_llamagen.transformer(kind)))
    denoiser_config = config_of(lambda: tiny_llamagen.denoiser(tiny_llamagen.transformer(kind, num_layers=1)))
    parts = {
        "neighbours": built(NEIGHBOURS[kind], dtype),
        "drafter": built(lambda: LlamaGenDrafter(**drafter_config), dtype),
        "denoiser": built(lambda: LlamaGenDenoiser(**denoiser_config), dtype),
    }
    return built(lambda: LlamaGenTransformer(**config), dtype), parts


def llamagen(kind, dtype, guided):
    transformer, parts = llamagen_parts(kind, dtype)
    condition, codebook = condition_of(kind, dtype), torch.randn(tiny.CODES, 4)
    return LlamaGenTokenModel(transformer, condition, LAYOUT, guided=guided, codebook=codebook, **parts)


@cache
def var_parts(kind, dtype):
    """A transformer, its refiner and the tokenizer, which stays in float32."""
    config, vq_config = config_of(lambda: tiny_var.transformer(kind, num_layers=1)), config_of(tiny.scale_tokenizer)
    transformer, refiner = (built(lambda: VARTransformer(**config), dtype) for _ in range(2))
    return transformer, refiner, built(lambda: VARVQModel(**vq_config), torch.float32)


def var(kind, dtype, guided):
    transformer, small, vq = var_parts(kind, dtype)
    condition = condition_of(kind, dtype)
    refiner = VARScaleModel(small, vq, condition, guided=guided)
    return VARScaleModel(transformer, vq, condition, guided=guided, refiner=refiner)


@cache
def infinity_parts(dtype):
    config, vq_config = config_of(lambda: tiny_infinity.transformer(num_layers=1)), config_of(tiny_infinity.tokenizer)
    transformer = built(lambda: InfinityTransformer(**config), dtype)
    return transformer, built(lambda: InfinityVQModel(**vq_config), torch.float32)


def infinity(dtype, guided):
    condition = condition_of("text", dtype)
    if guided:
        condition = with_unconditional(condition, kept=("prompt_attention_mask",))
    return InfinityScaleModel(*infinity_parts(dtype), condition, SCHEDULES[16, 16], guided=guided)


def infinitystar(dtype, guided):
    """A clip of five grids after the first frame, for texts of different lengths."""
    config = config_of(lambda: tiny_infinitystar.transformer(num_layers=1))
    transformer = built(lambda: InfinityStarTransformer(**config), dtype)
    condition = condition_of("text", dtype)
    if guided:
        condition = with_unconditional(condition, kept=("prompt_attention_mask",))
    grids = tuple((side, side + 1) for side in range(1, 6))
    film = passes(grids, 5, config["bits"], Repetitions(2, (1,) * 5, (1,) * 5))
    return InfinityStarScaleModel(transformer, condition, film, grids[-1], guided=guided, padded=True, threshold=0.05)


@cache
def language_parts(kind, dtype):
    """A decoder, how it embeds image tokens, its head, and the id of a row end."""
    if kind == "janus":
        config = JanusConfig.from_pretrained(tiny_janus.FOLDER)
        config.text_config.num_hidden_layers = 1
        janus = built(lambda: Janus(config), dtype)
        embed, head = janus.prepare_embeddings_for_image_generation, janus.model.generation_head
        return janus.model.language_model, embed, head, None
    if kind == "emu3":
        config = Emu3TextConfig(**tiny_emu3.CONFIG["text_config"] | {"num_hidden_layers": 1})
        decoder = built(lambda: Emu3TextModel(config), dtype)
        names, first, row_end, codes = tiny_emu3.VOCABULARY, "<|visual token 000000|>", "<|extra_200|>", 64
    elif kind == "emu3.5":
        shape = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen3Config(**shape, head_dim=16, num_hidden_layers=1, vocab_size=611)
        decoder = built(lambda: Qwen3Model(config), dtype)
        names, first, row_end, codes = {"code": 515, "row end": 507}, "code", "row end", 96
    else:
        names, first, row_end, codes = tiny_chameleon.vocabulary(), "IMGIMGAZ", "<reserved08799>", tiny_chameleon.CODES
        vq = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = ChameleonConfig(
            **shape, num_hidden_layers=1, vocab_size=len(names), vocabulary_map=names, vq_config=vq
        )
        decoder = built(lambda: ChameleonModel(config), dtype)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
    first = names[first]
    return decoder, lambda tokens: decoder.embed_tokens(tokens + first), CodeHead(head, first, codes), names[row_end]


def language_model(kind, dtype, guided):
    decoder, embed, head, row_end = language_parts(kind, dtype)
    branches = 2 if guided else 1
    prompts = torch.zeros(branches * BATCH, 5, dtype=torch.long)
    model = LanguageTokenModel(
        decoder, embed=embed, head=head, layout=LAYOUT, input_ids=prompts, row_end=row_end, branches=branches
    )
    model.codebook = torch.randn(model.vocab_size, 4)
    return model


@cache
def bind_glm_image():
    return step_models.MODELS["glm-image"].build(1)


def glm_image():
    """In the published size, in bfloat16: 16 x 16 tokens, then 32 x 32."""
    model = bind_glm_image()(BATCH).model
    model.codebook = torch.randn(model.vocab_size, 4)
    return model


@cache
def video_model(kind, dtype):
    model = cosmos(kind, dtype)
    model.codebook = torch.randn(model.vocab_size, 4)
    return model


@cache
def experts(dtype, guided):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 16, "gen_vocab_size": 80}
    return mammothmoda2("qwen2", dtype, guided, **shape)


@cache
def any_order_network(family, dtype):
    config = config_of(lambda: any_order.transformer(family))
    return built(lambda: any_order.classes(family)[0](**config), dtype)


def in_any_order(family, dtype, guided):
    kind = any_order.classes(family)[1]._token_model
    settings = {"guided": guided, "codebook": torch.randn(tiny.CODES, 4)}
    return kind(any_order_network(family, dtype), condition_of("class", dtype), ordered_layout(), **settings)


FAMILIES = {
    "llamagen-class": lambda *settings: llamagen("class", *settings),
    "llamagen-text": lambda *settings: llamagen("text", *settings),
    "var-class": lambda *settings: var("class", *settings),
    "var-text": lambda *settings: var("text", *settings),
    "infinity": infinity,
    "infinitystar": infinitystar,
    "janus": lambda *settings: language_model("janus", *settings),
    "emu3": lambda *settings: language_model("emu3", *settings),
    "emu3.5": lambda *settings: language_model("emu3.5", *settings),
    "lumina-mgpt": lambda *settings: language_model("lumina-mgpt", *settings),
    "glm-image": lambda dtype, guided: glm_image(),
    "mammothmoda2": experts,
    "cosmos": lambda dtype, guided: video_model("video", dtype),
    "cosmos-text": lambda dtype, guided: video_model("text", dtype),
    "arpg": lambda *settings: in_any_order("arpg", *settings),
    "lpd": lambda *settings: in_any_order("lpd", *settings),
    "randar": lambda *settings: in_any_order("randar", *settings),
}


def guidance_of(family):
    """Videos and GLM-Image have none."""
    return Sampling(guidance_scale=1.0 if "cosmos" in family or family == "glm-image" else 3.0)


def buffers(state):
    """All tensors that a state holds, by name, and those of its cache."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    cache = {f"cache.{name}": getattr(state.cache, name, None) for name in ("keys", "values", "change")}
    found = {}
    for name, value in (fields | cache).items():
        if name == "drafted":
            # One more per scale, until the refiner reads them.
            continue
        for i, tensor in enumerate(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)):
            found[name, i] = tensor
    return found


def run(decoding, model, sampling):
    """Start and take two steps. A model that hands over to its refiner also hands over its cache."""
    state = decoding.start(model, sampling, torch.zeros(BATCH, dtype=torch.long))
    state.time_steps(lambda: decoding.step(state), "")
    before = buffers(state)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in before.items()}
    for _ in range(STEPS):
        with DeviceOnly():
            decoding.step(state)
    after = buffers(state)
    assert list(after) == list(before)
    handed_over = state.model is not model
    moved = [key for key in after if after[key] is not before[key] and not (handed_over and "cache" in key[0])]
    assert not moved, f"replaced in a step: {moved}"
    for key, tensor in before.items():
        assert (tensor.shape, tensor.dtype) == shapes[key], f"{key} changed its shape in a step"


def cases():
    for family in FAMILIES:
        names = FOR_ANY_ORDER if family in any_order.FAMILIES else FOR_GRIDS if family == "glm-image" else FOR_TOKENS
        if family in ("infinity", "infinitystar"):
            names = ("next-scale", "fastvar")
        for name in FOR_SCALES if "var" in family else names:
            # Drafter and denoiser are LlamaGen's.
            if "llamagen" in family or ("eagle" not in name and name != "sjd2"):
                yield family, name


# Much like another family.
TWINS = ("llamagen-class", "var-text", "lumina-mgpt", "cosmos-text", "emu3", "emu3.5")
# What a decoding does on the device does not depend on the family: one family runs one of each method, others a few.
FEW = ("sjd-coupled", "next-scale", "groups")
FIRST = {PRESETS[name].method: name for name in reversed(FOR_TOKENS)}.values()


def is_quick(family, name):
    if family == "llamagen-text":
        return name in FIRST
    return (name in FEW and family not in TWINS) or (family, name) == ("var-class", "code")


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("family", "name"), [case if is_quick(*case) else pytest.param(*case, marks=pytest.mark.slow) for case in cases()]
)
def test_a_step_stays_on_the_device(family, name):
    run(decoding_from_name(name), FAMILIES[family](torch.float32, True), guidance_of(family))


# Steps over all rows, and those over few.
MASKED = ("halton", "confidence", "recap:full_steps=0", "ml-cache:warmup=0")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name", ["halton-maskgit-base-256", pytest.param("halton-maskgit-large-384", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("text", MASKED)
def test_a_step_of_masked_tokens_at_the_published_size_stays_on_the_device(name, text):
    published = step_models.MODELS[name]
    bound = published.build(published.layers)(BATCH)
    # All but the bias of the mask.
    parameters = {"halton-maskgit-base-256": 142_224_641, "halton-maskgit-large-384": 479_984_641}[name] - 1
    assert sum(p.numel() for p in bound.networks[0].parameters()) == parameters
    run(decoding_from_text(text), bound.model, bound.sampling)


QUICK = [("llamagen-text", "ar")]


class Counting:
    """A backend of torch.compile that runs the graphs as they are and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.skipif(
    torch.__version__ < (2, 14), reason="PyTorch before 2.14 compiles no unflatten under a default device"
)
@pytest.mark.parametrize(
    ("family", "name"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in cases()]
)
def test_a_step_is_one_graph(family, name):
    torch.compiler.reset()
    model, decoding, counting = FAMILIES[family](torch.float32, True), decoding_from_name(name), Counting()
    step = torch.compile(type(decoding).step, fullgraph=True, dynamic=False, backend=counting)
    state = decoding.start(model, guidance_of(family), torch.zeros(BATCH, dtype=torch.long))
    for _ in range(STEPS):
        step(decoding, state)
    # Every scale and every group has shapes of its own.
    assert counting.graphs == (STEPS if name in FOR_SCALES or name == "groups" else 1)


def all_settings(model):
    """A sampling that uses all of its settings. Its own check of `allowed` reads the host, before a run."""
    sampling = Sampling(**EVERYTHING, guided_tokens=9)
    object.__setattr__(sampling, "allowed", torch.ones(model.vocab_size, dtype=torch.bool))
    object.__setattr__(sampling, "forced", torch.full((BATCH, model.num_tokens), -1))
    return sampling


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST else pytest.param(name, marks=pytest.mark.slow)
        for name in [*FOR_TOKENS, "groups", *FOR_SCALES]
    ],
)
def test_a_step_with_every_setting_of_sampling_in_bfloat16_without_guidance(name):
    family = "var-class" if name in FOR_SCALES else "arpg" if name == "groups" else "llamagen-class"
    model = FAMILIES[family](torch.bfloat16, False)
    # How many tokens come first that are known is read where it decides the sizes of groups.
    decoding = GroupDecoding((model.num_tokens // 2,) * 2) if name == "groups" else decoding_from_name(name)
    run(decoding, model, all_settings(model))


VARIANTS = [
    "sjd-coupled:init=above",
    "sjd-coupled:relax=1.5",
    "sjd-coupled:corrections=2",
    "sjd-coupled:window=auto",
    "sjd2:levels=3,refresh=gumbel",
    "groups:groups=1+3+12,guidance_schedule=constant,attention=causal",
    "zipar:window=1,adaptive=true",
    "pjd:context=1,refresh=independent",
    "line-cache:lines=2",
    "eagle:tree=static",
    "flow:guesses=random",
    "next-scale:more_smooth=true",
    "next-scale:pruned=0.5+,stop_after=3,guided_scales=2",
    "code:drafter_scales=1",
]


@pytest.mark.every(6)
@pytest.mark.parametrize("text", VARIANTS)
def test_a_step_of_other_settings(text, monkeypatch):
    monkeypatch.setattr(speculative_jacobi, "step_seconds", lambda *_: {1: 1.0, 4: 1.1, 8: 1.3})
    name, settings = parse_decoding(text)
    family = "var-class" if name in FOR_SCALES else "arpg" if name == "groups" else "llamagen-class"
    run(decoding_from_name(name, **settings), FAMILIES[family](torch.float32, True), Sampling(**EVERYTHING))


@pytest.mark.parametrize(
    "text",
    [
        "sjd-coupled:init=previous",
        *(pytest.param(f"{text}:init=previous", marks=pytest.mark.slow) for text in ("sjd-tree", "sjd-lazy")),
    ],
)
def test_a_step_with_drafts_from_the_frame_before(text):
    name, settings = parse_decoding(text)
    run(decoding_from_name(name, **settings), FAMILIES["cosmos"](torch.float32, False), Sampling(top_p=0.8))


@pytest.mark.parametrize(
    "text",
    ["sjd-coupled:window=6", *(pytest.param(text, marks=pytest.mark.slow) for text in ("ar", "sjd", "sjd-gumbel"))],
)
def test_a_step_of_a_model_that_predicts_blocks(text):
    name, settings = parse_decoding(text)
    model = cosmos("text", torch.float32, block_tokens=4)
    run(decoding_from_name(name, **settings), model, Sampling(top_p=0.8))


def broken(change):
    """Autoregressive decoding with a defect in its step."""
    decoding = decoding_from_name("ar")
    step = type(decoding).step

    class Broken(type(decoding)):
        def step(self, state):
            step(self, state)
            change(state)

    return Broken()


def replace_a_buffer(state):
    state.steps = state.steps + 1


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda state: state.steps.max().item(), DataDependentOutputException),
        (lambda state: bool(state.finished.all()), DataDependentOutputException),
        (lambda state: state.finished.nonzero(), torch._subclasses.fake_tensor.DynamicOutputShapeException),
        (lambda state: state.tokens[:, 0].cpu(), AssertionError),
        (lambda state: torch.zeros(2, device="cpu"), AssertionError),
        (lambda state: state.steps.add_(torch.tensor([1, 1], device="cuda")), AssertionError),
        (lambda state: state.tokens[:, [0, 1]], AssertionError),
        (replace_a_buffer, AssertionError),
    ],
    ids=["item", "bool", "nonzero", "to the CPU", "on the CPU", "from Python", "list as index", "replaced buffer"],
)
def test_a_broken_step_is_noticed(change, error):
    with pytest.raises(error):
        run(broken(change), FAMILIES["llamagen-class"](torch.float32, True), Sampling())
