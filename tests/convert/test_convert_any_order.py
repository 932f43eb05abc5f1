"""Published files of ARPG, LPD and RandAR become pipelines, and what does not fit is refused in one sentence."""

import shutil

import pytest
import torch
from pipelines.arpg import tiny as tiny_arpg
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.lpd import tiny as tiny_lpd
from pipelines.randar.published import original_state
from safetensors.torch import save_file

from arimage import AutoPipeline
from arimage.convert import CheckpointError, convert_arpg, convert_lpd, convert_randar
from arimage.convert.checkpoint import load_original


TOKENIZER = tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt"
FOLDERS = {"arpg": tiny_arpg.FOLDER, "lpd": tiny_lpd.FOLDER}
CONVERT = {"arpg": convert_arpg, "lpd": convert_lpd, "randar": convert_randar}


@pytest.fixture(params=CONVERT)
def published(request, tmp_path):
    """A converter, and a folder with the model's file and a config.json."""
    folder = tmp_path / request.param
    if request.param == "randar":
        folder.mkdir()
        save_file(original_state(), folder / "randar.safetensors")
        (folder / "config.json").write_text('{"block_size": 36, "n_head": 4}')
    else:
        shutil.copytree(FOLDERS[request.param], folder)
        (folder / "expected.safetensors").unlink()
    return CONVERT[request.param], folder


def run(pipe):
    return pipe(class_labels=[1, 2], generator=torch.Generator().manual_seed(0), output_type="latent").images


@pytest.mark.every(2)
def test_a_folder_becomes_a_pipeline_with_the_published_settings(published, tmp_path):
    convert, folder = published
    pipe = convert(folder, tokenizer=TOKENIZER, out=tmp_path / "out")
    assert pipe.vq is not None and pipe.num_classes == 10 and pipe.transformer.config.grid_size == 6
    assert pipe.transformer.config.num_attention_heads == 4 and pipe.generation_config["guidance_scale"] > 3
    assert pipe.order == ("locality" if convert is convert_lpd else "farthest")
    loaded = AutoPipeline.from_pretrained(tmp_path / "out")
    assert torch.equal(run(loaded), run(pipe)) and loaded.order == pipe.order


@pytest.mark.every(2)
def test_a_tokenizer_in_the_folder_is_found_and_may_be_missing(published):
    convert, folder = published
    bare = convert(folder)
    assert bare.vq is None
    shutil.copy(TOKENIZER, folder / "vq_ds16_c2i.pt")
    whole = convert(folder)
    assert whole.vq is not None and torch.equal(run(whole), run(bare))


def test_what_the_tensors_do_not_show_may_be_given(published):
    convert, folder = published
    (folder / "config.json").unlink()
    (file,) = folder.iterdir()
    options = {} if convert is convert_lpd else {"image_size": 96}
    pipe = convert(file, num_heads=4, **options)
    assert pipe.transformer.config.num_attention_heads == 4 and pipe.transformer.config.grid_size == 6


def test_averaged_weights_are_taken_where_they_are_asked_for(published, tmp_path, caplog):
    convert, folder = published
    (file,) = [path for path in folder.iterdir() if path.suffix != ".json"]
    state = load_original(file)
    averaged = {f"module.{key}": value + 1 for key, value in state.items()}
    torch.save({"model": state, "ema": averaged}, tmp_path / "trainer.pt")
    options = {"num_heads": 4} | ({} if convert is convert_lpd else {"image_size": 96})
    last, mean = (convert(tmp_path / "trainer.pt", **options, ema=ema).transformer for ema in (False, True))
    assert "trainer.pt has averaged weights too, under 'ema'" in caplog.text
    for ours, theirs in zip(mean.parameters(), last.parameters(), strict=True):
        assert torch.equal(ours, theirs + 1)
    with pytest.raises(CheckpointError, match="no averaged weights"):
        convert(folder, ema=True)


def test_no_or_several_files_are_refused(published):
    convert, folder = published
    (file,) = [path for path in folder.iterdir() if path.suffix != ".json"]
    shutil.copy(file, folder / f"other{file.suffix}")
    with pytest.raises(CheckpointError, match=f"other.*{file.name}|{file.name}.*other"):
        convert(folder)
    with pytest.raises(CheckpointError, match="no file that ends in"):
        convert(folder.parent)


def test_heads_that_do_not_fit_are_refused(published):
    convert, folder = published
    with pytest.raises(CheckpointError, match="num-heads"):
        convert(folder, num_heads=5)


def test_an_image_size_between_tokens_is_refused(published):
    convert, folder = published
    if convert is convert_lpd:
        pytest.skip("its position embedding shows the size")
    with pytest.raises(CheckpointError, match="image size 100"):
        convert(folder, image_size=100)
