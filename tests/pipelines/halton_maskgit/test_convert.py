"""Files of Halton-MaskGIT that are complete, damaged, or of another model."""

import pytest
import torch
from pipelines.halton_maskgit.tiny import FOLDER
from pipelines.llamagen.tiny import FIXTURES

from arimage.convert import CheckpointError, convert_halton_maskgit
from arimage.decoding import HaltonDecoding
from arimage.pipelines.halton_maskgit.convert import NUM_HEADS


CHECKPOINT, VQ = FOLDER / "halton_tiny.pth", FIXTURES / "c2i/vq_ds4_c2i.pt"


@pytest.fixture
def state():
    return torch.load(CHECKPOINT, weights_only=True)["model_state_dict"]


def convert(checkpoint=CHECKPOINT, vq=VQ, num_heads=5, **options):
    return convert_halton_maskgit(checkpoint, vq, num_heads=num_heads, **options)


def written(tmp_path, state):
    torch.save({"iter": 1, "model_state_dict": state, "optimizer_state_dict": None}, tmp_path / "halton.pth")
    return tmp_path / "halton.pth"


def test_the_weights_of_a_trainer_are_taken(state):
    pipe = convert()
    config = pipe.transformer.config
    assert (config.num_layers, config.num_registers, config.num_classes, config.grid_size) == (3, 1, 10, 8)
    assert (config.vocab_size, config.intermediate_size, pipe.transformer.head_dim) == (128, 256, 6)
    assert torch.equal(pipe.transformer.token_embedding.weight, state["tok_emb.weight"])
    assert pipe.decoding == HaltonDecoding() and pipe.image_sizes == [(32, 32)]


def test_a_model_without_registers(state, tmp_path):
    del state["reg_tokens.weight"]
    assert convert(written(tmp_path, state)).transformer.num_rows == 64


def test_heads_that_no_file_holds_are_asked_for(monkeypatch):
    with pytest.raises(CheckpointError, match="num_heads is None"):
        convert_halton_maskgit(CHECKPOINT, VQ)
    # 30 channels are those of 6 heads as well: nothing shows that they are not.
    assert convert(num_heads=6).transformer.head_dim == 5
    for heads in (4, 33):
        with pytest.raises(CheckpointError, match=f"num_heads is {heads}"):
            convert(num_heads=heads)
    monkeypatch.setitem(NUM_HEADS, (32, 3), 5)
    assert convert(num_heads=None).transformer.config.num_attention_heads == 5


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pos_emb.weight", torch.zeros(63, 32)),
        ("head.weight", torch.zeros(129, 32)),
        ("transformer.layers.1.attn.wk.weight", torch.zeros(24, 32)),
    ],
)
def test_a_transformer_that_is_not_whole_is_refused(state, tmp_path, key, value):
    state.pop(key, None)
    if value is not None:
        state[key] = value
    with pytest.raises(CheckpointError, match="63 places" if key.startswith("pos") else key):
        convert(written(tmp_path, state))


def test_files_that_do_not_fit_each_other_are_refused(state, tmp_path):
    state["tok_emb.weight"] = state["head.weight"] = state["tok_emb.weight"][:100]
    state["head.bias"] = state["head.bias"][:100]
    with pytest.raises(CheckpointError, match="the transformer has 99, the image tokenizer 128"):
        convert(written(tmp_path, state))
    with pytest.raises(CheckpointError, match="LlamaGen tokenizer"):
        convert(VQ, CHECKPOINT)
