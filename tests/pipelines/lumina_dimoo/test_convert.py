"""The published layout of Lumina-DiMOO, converted: the same tensors, and what is refused."""

import json
import shutil

import pytest
import torch
from pipelines.lumina_dimoo import tiny

from arimage import AutoPipeline
from arimage.cli import main as cli
from arimage.convert import CheckpointError, convert_lumina_dimoo
from arimage.convert.folder import load_original_folder
from arimage.pipelines.lumina_dimoo.convert import EMBEDDING, HEAD, lumina_dimoo_from_original
from arimage.pipelines.lumina_dimoo.vocabulary import FIRST_CODE, NUM_CODES


QUERY = "model.transformer.blocks.0.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return tiny.write_original(tmp_path / "Lumina-DiMOO")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The tensors and settings of the authors' folder."""
    folder = tiny.write_original(tmp_path_factory.mktemp("original") / "Lumina-DiMOO")
    return load_original_folder(folder), json.loads((folder / "config.json").read_text())


def logits_of(transformer):
    ids = tiny.EXPECTED["forward_half.ids"].long()[None]
    with torch.no_grad():
        return transformer.float()(ids, torch.arange(ids.shape[1])[None])


def test_the_command_writes_a_pipeline_that_loads(folder, tmp_path):
    cli.app(["convert", "lumina-dimoo", str(folder), "--out", str(tmp_path / "pipe")], standalone_mode=False)
    pipe = AutoPipeline.from_pretrained(tmp_path / "pipe")
    assert torch.equal(logits_of(pipe.transformer), logits_of(tiny.converted().transformer))
    assert pipe.transformer.embedding.num_embeddings == FIRST_CODE + NUM_CODES
    assert pipe.transformer.head.out_features == NUM_CODES
    assert pipe.image_sizes == [(1024, 1024)] and pipe.image_guidance_scale == 5
    assert pipe.generation_config["guidance_scale"] == 5


def test_rows_beyond_the_last_code_change_nothing(original):
    state, config = original
    longer = {
        key: torch.cat([tensor, torch.full_like(tensor[:108], 9)]) if key in (EMBEDDING, HEAD) else tensor
        for key, tensor in state.items()
    }
    converted = lumina_dimoo_from_original(longer, config | {"embedding_size": 134_656})
    assert torch.equal(logits_of(converted), logits_of(tiny.converted().transformer))


def test_heads_may_share_keys_and_values(original):
    state, config = original
    state = {
        key: value[:16] if key.endswith(("k_proj.weight", "v_proj.weight")) else value for key, value in state.items()
    }
    assert logits_of(lumina_dimoo_from_original(state, config | {"n_kv_heads": 2})).isfinite().all()


@pytest.mark.parametrize(
    ("key", "rows", "words"),
    [
        (EMBEDDING, 126_464, r"wte.weight' with 126,464 rows where at least 134,548"),
        (HEAD, -1, r"ff_out.weight' with 134,547 rows"),
        (QUERY, 16, rf"'{QUERY}' of shape \(16, 32\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(original, key, rows, words):
    state, config = original
    with pytest.raises(CheckpointError, match=words):
        lumina_dimoo_from_original(state | {key: state[key][:rows]}, config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"block_type": "sequential"}, "block_type"),
        ({"weight_tying": True}, "weight_tying"),
        ({"mlp_hidden_size": None}, "mlp_hidden_size"),
        ({"n_heads": 5}, "heads"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, settings, words):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=words):
        convert_lumina_dimoo(folder)


def test_a_tokenizer_without_the_tags_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("</user>", "</person>"))
    with pytest.raises(CheckpointError, match="</user>"):
        convert_lumina_dimoo(folder)


def test_a_folder_without_the_image_tokenizer_is_refused(folder, tmp_path):
    shutil.rmtree(folder / "vqvae")
    with pytest.raises(CheckpointError, match="vqvae"):
        convert_lumina_dimoo(folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_published_folder_says_that_it_needs_converting(folder):
    (folder / "model_index.json").write_text(json.dumps(tiny.AUTHORS_INDEX))
    with pytest.raises(ValueError, match="arimage convert lumina-dimoo"):
        AutoPipeline.from_pretrained(folder)
