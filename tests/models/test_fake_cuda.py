"""Every forward pass on fake CUDA tensors: nothing mixes devices, reads the host, or has a shape that depends on
data."""

import pytest
import tiny
import torch
from diffusers.models.autoencoders import autoencoder_kl_cosmos
from pipelines.cosmos import tiny as tiny_cosmos
from torch._subclasses.fake_tensor import FakeTensorMode

from arimage.decoding import Layout
from arimage.pipelines.cosmos.fsq_cosmos import CosmosVideoTokenizer
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTokenModel, CosmosTransformer
from arimage.pipelines.mammothmoda2.decoder_mammothmoda2 import MammothModa2Transformer2DModel
from arimage.pipelines.mammothmoda2.transformer_mammothmoda2 import (
    MammothModa2Config,
    MammothModa2LanguageModel,
    bind_prompts,
    read_sequence,
)


BATCH, QUERIES, SCRATCH = 2, 6, 4
LAYOUT = Layout((4, 4))
DTYPES = torch.bfloat16, torch.float32


def by_dtype(name, values):
    """Parametrizes a test by `name` and by dtype, of which each value has one and the other is slow."""
    values = list(values)
    quick = [(value, DTYPES[i % 2]) for i, value in enumerate(values)]
    slow = [pytest.param(value, DTYPES[1 - i % 2], marks=pytest.mark.slow) for i, value in enumerate(values)]
    return pytest.mark.parametrize((name, "dtype"), quick + slow)


@pytest.fixture(autouse=True)
def fake_cuda():
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        yield


def built(make, dtype):
    """The result of `make` with weights of `dtype`; fake weights cannot be cast afterwards."""
    torch.set_default_dtype(dtype)
    try:
        return make().eval()
    finally:
        torch.set_default_dtype(torch.float32)


def config_of(build):
    """The configuration of a tiny component, which is itself built outside of the fake mode."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.device("cpu"):
        return {name: value for name, value in build().config.items() if not name.startswith("_")}


def condition_of(kind, dtype):
    if kind == "class":
        return {"class_labels": torch.zeros(BATCH, dtype=torch.long)}
    embeds = torch.randn(BATCH, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, dtype=dtype)
    return {"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(BATCH, tiny.TEXT_LENGTH, dtype=torch.long)}


# The widths of the published Preview and Dev.
MAMMOTHMODA2 = {
    "qwen2": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"vocab_size": 152064, "gen_head_start": 152064},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"vocab_size": 151936, "gen_head_start": 151936, "condition_layers": [-2, -3]},
}


def mammothmoda2(backbone, dtype, guided=True, **settings):
    """Two layers, one of them with experts, in the published size but for `settings`, and prompts of text and of
    generation tokens."""
    shape = {"num_hidden_layers": 2, "expert_layers": [1, 2], "head_dim": 128, **MAMMOTHMODA2[backbone]}
    config = MammothModa2Config(backbone=backbone, **shape | settings)
    network = built(lambda: MammothModa2LanguageModel(config), dtype)
    branches = 2 if guided else 1
    ids = torch.full((branches * BATCH, 12), 5)
    ids[:, -1] = config.image_end_id
    return bind_prompts(network, ids, None, LAYOUT, config.num_codes, branches)


def cosmos(kind, dtype, **settings):
    """Two maps of 2 x 4 tokens after a given one, so that they are as many as those of `LAYOUT`."""
    config = config_of(lambda: tiny_cosmos.transformer(kind))
    transformer = built(lambda: CosmosTransformer(**config | settings), dtype)
    given = torch.zeros(BATCH, 1, 2, 4, dtype=torch.long)
    embeds = torch.randn(BATCH, 5, tiny.TEXT_WIDTH, dtype=dtype) if kind == "text" else None
    return CosmosTokenModel(transformer, Layout((2, 2, 4)), given, embeds)


def ordered_layout():
    """A layout with orders, whose check reads the host."""
    layout = Layout((4, 4))
    layout.order, layout._rank_of = torch.arange(2 * BATCH * 16).view(2, BATCH, 16)
    return layout


def assert_logits(logits, *shape, branches=2):
    assert logits.shape == (branches, BATCH, *shape)
    assert logits.is_floating_point() and logits.device.type == "cuda"


def run_tokens(model, branches=2):
    """A prefill, a forward pass over tokens and one over a tree in scratch slots, a move, and the cache's other
    operations."""
    cache, logits = model.prefill(BATCH, scratch=SCRATCH)
    assert_logits(logits, model.vocab_size, branches=branches)
    tokens = torch.zeros(BATCH, QUERIES, dtype=torch.long)
    positions = torch.arange(QUERIES).expand(BATCH, -1)
    assert_logits(model.forward(tokens, positions, cache), QUERIES, model.vocab_size, branches=branches)
    visible = torch.ones(BATCH, SCRATCH, model.num_tokens + SCRATCH, dtype=torch.bool)
    slots = model.num_tokens + torch.arange(SCRATCH).expand(BATCH, -1)
    logits = model.forward(tokens[:, :SCRATCH], positions[:, :SCRATCH], cache, visible=visible, slots=slots)
    assert_logits(logits, SCRATCH, model.vocab_size, branches=branches)
    cache.move(slots, positions[:, :SCRATCH])
    cache.expand(torch.zeros(BATCH, dtype=torch.long))
    assert_logits(model.forward(tokens, positions, cache), QUERIES, model.vocab_size, branches=branches)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_the_video_tokenizer(dtype, monkeypatch):
    config = config_of(tiny_cosmos.video_tokenizer)
    # A tensor of diffusers that was made outside of the fake mode.
    monkeypatch.setattr(autoencoder_kl_cosmos, "_WAVELETS", {"haar": torch.ones(2)})
    vq = built(lambda: CosmosVideoTokenizer(**config), dtype)
    codes = vq.encode(torch.zeros(BATCH, 3, 9, 32, 48, dtype=dtype))
    assert codes.shape == (BATCH, 2, 2, 3) and codes.dtype == torch.long and codes.device.type == "cuda"
    stream = vq.stream()
    frames = [stream.decode(maps) for maps in codes.split(1, dim=1)]
    assert [part.shape[2] for part in frames] == [1, 8] and frames[1].dtype == dtype
    assert vq.decode(codes).shape == (BATCH, 3, 9, 32, 48) and vq.code_vectors().device.type == "cuda"


@pytest.mark.every(2)
@by_dtype("backbone", MAMMOTHMODA2)
def test_mammothmoda2(backbone, dtype):
    model = mammothmoda2(backbone, dtype)
    run_tokens(model)
    states = read_sequence(model.network, torch.zeros(40, dtype=torch.long))
    assert states.shape == (40, MAMMOTHMODA2[backbone]["hidden_size"]) and states.dtype == dtype and states.is_cuda


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("projects_queries", [True, False])
def test_the_decoder_of_mammothmoda2(projects_queries, dtype):
    shape = {"hidden_size": 2520, "num_attention_heads": 21, "num_kv_heads": 7, "axes_dim_rope": (40, 40, 40)}
    shape |= {"num_layers": 2, "projects_queries": projects_queries, "text_feat_dim": 3584}
    decoder = built(lambda: MammothModa2Transformer2DModel(**shape), dtype)
    text, image = ([torch.randn(count, 3584, dtype=dtype) for count in counts] for counts in ((30, 12), (1059, 300)))
    latents, time = torch.randn(BATCH, 16, 64, 128), torch.zeros(BATCH)
    for given in ([text], [text, image], [text, image, [[latents[0, :, :32]], []]]):
        velocity = decoder(latents, time, *given)
        assert velocity.shape == latents.shape and velocity.dtype == dtype and velocity.is_cuda
