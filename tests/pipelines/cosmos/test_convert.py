import os
import pickle
import shutil
import zipfile

import pytest
import tiny
import torch
from pipelines.cosmos.tiny import FOLDER, TOKENIZER

from arimage import AutoPipeline
from arimage.convert import CheckpointError, convert_cosmos, convert_cosmos_tokenizer
from arimage.convert.checkpoint import load_original
from arimage.convert.torchscript import load_torchscript
from arimage.models.original_names import rename
from arimage.pipelines.cosmos.convert import NAMES, cosmos_transformer_from_original
from arimage.pipelines.cosmos.convert_tokenizer import cosmos_tokenizer_from_original
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTransformer


MODEL = FOLDER / "base.pt"
TEXT_MODEL = FOLDER / "video2world.pt"


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def rewrite(source, target, change):
    """Copy an archive, with `change(name, content)` in place of each member; None leaves it out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)


@pytest.fixture
def state():
    return load_torchscript(TOKENIZER / "encoder.jit") | load_torchscript(TOKENIZER / "decoder.jit")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["encoder.jit", "decoder.jit"])
def test_archives_are_read_as_torch_reads_them(name):
    ours, theirs = load_torchscript(TOKENIZER / name), torch.jit.load(TOKENIZER / name).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)


def test_code_in_an_archive_is_refused_and_not_run(tmp_path):
    trace = tmp_path / "trace"
    evil = pickle.dumps(Code(trace), protocol=2)
    rewrite(
        TOKENIZER / "encoder.jit",
        tmp_path / "evil.jit",
        lambda name, content: evil if name.endswith("/data.pkl") else content,
    )
    with pytest.raises(CheckpointError, match=r"evil\.jit .* asks for \w+\.mkdir"):
        load_torchscript(tmp_path / "evil.jit")
    assert not trace.exists()


def test_damaged_archives_are_refused(tmp_path):
    cut = tmp_path / "cut.jit"
    cut.write_bytes((TOKENIZER / "encoder.jit").read_bytes()[:-1000])
    short = tmp_path / "short.jit"
    rewrite(
        TOKENIZER / "encoder.jit",
        short,
        lambda name, content: content[:-4] if "/data/" in name and len(content) > 4 else content,
    )
    missing = tmp_path / "missing.jit"
    rewrite(TOKENIZER / "encoder.jit", missing, lambda name, content: None if name.endswith("data.pkl") else content)
    for path in (cut, short, missing, tmp_path / "none.jit", TOKENIZER / "expected.safetensors"):
        with pytest.raises(CheckpointError, match=path.name):
            load_torchscript(path)


@pytest.mark.parametrize(
    ("name", "named"), [("encoder", r"decoder\.jit"), ("decoder", "autoencoder.jit"), ("auto", "_levels")]
)
def test_a_folder_without_one_half_is_refused(tmp_path, name, named):
    target = "autoencoder.jit" if name == "auto" else f"{name}.jit"
    shutil.copy(TOKENIZER / f"{'decoder' if name == 'auto' else name}.jit", tmp_path / target)
    with pytest.raises(CheckpointError, match=named):
        convert_cosmos_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("quantizer._levels"), "_levels"),
        (lambda state: state.pop("encoder.mid.attn_1.1.k.conv3d.bias"), r"attn_1\.1\.k"),
        (lambda state: state.pop("decoder.up.0.block.0.conv1.0.conv3d.weight"), "decoder.up.0"),
        (lambda state: state.update({"decoder.up.0.attn.0.0.q.conv3d.weight": torch.zeros(1)}), "attn.0.0.q"),
        (
            lambda state: state.update({"encoder.conv_in.0.conv3d.weight": torch.zeros(4, 100, 1, 3, 3)}),
            "another|not that",
        ),
    ],
)
def test_other_tensors_than_those_of_a_tokenizer_are_refused(state, change, message):
    change(state)
    with pytest.raises(CheckpointError, match=message):
        cosmos_tokenizer_from_original(state)


@pytest.mark.parametrize(("name", "yarn"), [("base", False), ("base_yarn", True), ("video2world", False)])
def test_sizes_come_from_the_tensors_and_yarn_from_the_width_of_the_heads(name, yarn, caplog):
    with caplog.at_level("WARNING"):
        pipe = convert_cosmos(FOLDER / f"{name}.pt", tokenizer=TOKENIZER)
    config = pipe.transformer.config
    assert config.yarn == yarn and tuple(config.shape) == (5, 40, 64)
    assert (config.context_dim, config.embeddings) == ((32, 256) if name == "video2world" else (None, 240))
    assert not pipe.config.requires_safety_checker
    assert f"give yarn={not yarn} if that is wrong" in caplog.text
    state = load_original(FOLDER / f"{name}.pt")
    assert cosmos_transformer_from_original(state, yarn=not yarn).config.yarn == (not yarn)


@pytest.mark.parametrize(("size", "yarn"), [((4096, 16), False), ((5120, 40), True)])
def test_the_published_sizes_are_known(size, yarn, caplog):
    with torch.device("meta"):
        published = CosmosTransformer(hidden_size=size[0], num_layers=size[1], intermediate_size=8, vocab_size=5)
    state = {rename(name, NAMES): weight for name, weight in published.state_dict().items()}
    with caplog.at_level("WARNING"):
        transformer = cosmos_transformer_from_original(state)
    assert transformer.config.yarn == yarn and not caplog.text


def test_a_model_keeps_the_dtype_of_its_file(tmp_path):
    state = {key: value.bfloat16() for key, value in load_original(MODEL).items()}
    torch.save(state | {"model.layers.0.attention._extra_state": torch.zeros(1)}, tmp_path / "model.pt")
    pipe = convert_cosmos(tmp_path / "model.pt", tokenizer=TOKENIZER)
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vq.dtype == torch.float32


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.layers.1.attention.wk.weight"), "layers.1.attention.wk"),
        (lambda state: state.pop("model.norm.weight"), "norm.weight"),
        (lambda state: state.update({"model.layers.0.attention.wqkv.weight": torch.zeros(4, 4)}), "wqkv"),
        (lambda state: state.update({"model.output.weight": torch.zeros(64, 64)}), ", the video tokenizer 240"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(change, message, tmp_path):
    state = load_original(MODEL)
    change(state)
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        convert_cosmos(tmp_path / "model.pt", tokenizer=TOKENIZER)


def test_a_tokenizer_of_another_kind_is_refused(state, tmp_path, monkeypatch):
    # A DV4x16x16 has one level less that halves the time.
    for half, conv in (("encoder.down.0.downsample", "conv2"), ("decoder.up.1.upsample", "conv1")):
        for part in ("weight", "bias"):
            state.pop(f"{half}.{conv}.conv3d.{part}", None)
    other = cosmos_tokenizer_from_original(state)
    monkeypatch.setattr("arimage.pipelines.cosmos.convert.convert_cosmos_tokenizer", lambda folder: other)
    with pytest.raises(CheckpointError, match="that of a DV4x16x16"):
        convert_cosmos(MODEL, tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_frames": 32}, "num_frames is 32"),
        ({"height": 650}, "height and width"),
        ({"width": 0}, "height and width"),
    ],
)
def test_sizes_that_the_tokenizer_has_not_are_refused(settings, message):
    with pytest.raises(CheckpointError, match=message):
        convert_cosmos(MODEL, tokenizer=TOKENIZER, **settings)


def test_a_text_encoder_is_for_models_with_text(tmp_path):
    tokenizer = tiny.text_tokenizer()
    tokenizer.save_pretrained(tmp_path / "t5")
    tiny.text_encoder(len(tokenizer), width=32).save_pretrained(tmp_path / "t5")
    pipe = convert_cosmos(TEXT_MODEL, tokenizer=TOKENIZER, text_encoder=tmp_path / "t5", out=tmp_path / "out")
    assert pipe.text_encoder.config.d_model == 32
    assert AutoPipeline.from_pretrained(tmp_path / "out").tokenizer is not None
    with pytest.raises(CheckpointError, match="reads no text"):
        convert_cosmos(MODEL, tokenizer=TOKENIZER, text_encoder=tmp_path / "t5")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("layers.0.self_attention.layernorm_qkv.query_weight", "TransformerEngine"),
        ("module.decoder.layers.0.self_attention.linear_qkv.weight", "NeMo"),
    ],
)
def test_other_layouts_are_refused_by_name(name, layout, tmp_path):
    torch.save({"model": {name: torch.zeros(2, 2), "norm.weight": torch.zeros(2)}}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=layout):
        convert_cosmos(tmp_path / "model.pt", tokenizer=TOKENIZER)
