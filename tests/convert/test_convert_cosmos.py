import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from arimage.convert import CheckpointError, convert_cosmos_tokenizer
from arimage.convert.cosmos_tokenizer import cosmos_tokenizer_from_original
from arimage.convert.torchscript import load_torchscript


FIXTURES = Path(__file__).parents[1] / "fixtures"
TOKENIZER = FIXTURES / "cosmos_tokenizer"


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


@pytest.mark.filterwarnings("ignore")
def test_one_archive_of_both_halves_is_read_too(state, tmp_path):
    class Half(torch.nn.Module):
        def forward(self, x):
            return x

    whole = Half()
    for key, value in state.items():
        module, (*path, name) = whole, key.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, Half())
            module = module._modules[part]
        module.register_buffer(name, value)
    torch.jit.script(whole).save(tmp_path / "autoencoder.jit")
    tokenizer = convert_cosmos_tokenizer(tmp_path)
    assert torch.equal(tokenizer.quant_conv.weight, state["quant_conv.conv3d.weight"])


def test_a_tokenizer_keeps_the_dtype_of_its_files(state):
    half = {key: value.bfloat16() if value.is_floating_point() else value for key, value in state.items()}
    assert cosmos_tokenizer_from_original(half).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["encoder.jit", "decoder.jit"])
def test_a_folder_without_one_half_is_refused(tmp_path, name):
    shutil.copy(TOKENIZER / name, tmp_path)
    with pytest.raises(CheckpointError, match=r"(encoder|decoder)\.jit"):
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


def test_a_converted_tokenizer_is_saved_to_a_new_folder_only(tmp_path):
    convert_cosmos_tokenizer(TOKENIZER, out=tmp_path / "new")
    assert (tmp_path / "new" / "config.json").is_file()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_cosmos_tokenizer(TOKENIZER, out=tmp_path / "new")
