"""The benchmarks that compare and scale, at tiny sizes where they need no other code."""

import re
import sys
from pathlib import Path

import diffusers
import pytest
import torch
import transformers


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import compare_fidelity
import compare_llamagen
import compare_transformers
import compare_var
import hybrid_stages
import scaling
import side_by_side
import store_float8
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import LlamaGenTransformer


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
COMMON = ("--repeats", "2", "--steps", "3")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the `main` of a benchmark and returns the lines that it prints."""

    def main(module, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--device", "cpu"])
        module.main()
        return capsys.readouterr().out.splitlines()

    levels = [(library.logging, library.logging.get_verbosity()) for library in (diffusers.utils, transformers.utils)]
    yield main
    for logging, level in levels:
        logging.set_verbosity(level)


def test_a_fid_is_checked_and_timed_next_to_torch_fidelity(run, monkeypatch):
    monkeypatch.setattr(compare_fidelity, "WIDTH", 12)
    monkeypatch.setitem(compare_fidelity.DISTANCES, "fvd", (40, 8))
    tables = ("fid-next-to-torch-fidelity", "fvd")
    lines = run(compare_fidelity, "--images", "50", "--repeats", "1", "--tables", *tables)
    assert any(re.fullmatch(r"FID of 50 pictures: (\S+) here, \1 of torch-fidelity", line) for line in lines)
    rows = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert rows == ["| ", "| torch-fidelity", "| arimage", "| ", "| one distance", "| with its error and limit"]


def test_every_script_has_its_line():
    folder = Path(scaling.__file__).parent
    named = re.findall(r"`(\w+\.py)`", (folder / "README.md").read_text(encoding="utf-8"))
    assert set(named) == {path.name for path in folder.glob("*.py")}


def test_large_matrices_are_stored_in_half_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(store_float8, "LEAST", 1024)
    transformer = tiny_llamagen.text_pipeline().transformer
    transformer.half().save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    before = file.stat().st_size
    store_float8.store_float8(file)
    assert file.stat().st_size < 0.8 * before
    loaded = LlamaGenTransformer.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, weight in transformer.state_dict().items():
        large = weight.ndim == 2 and weight.numel() >= 1024
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], (weight.to(torch.float8_e4m3fn) if large else weight).float())


@pytest.mark.parametrize(
    "name", ["janus-pro-1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("emu3", "emu3.5")), "glm-image"]
)
def test_transformers_is_checked_and_timed_next_to_ours(name, run, monkeypatch):
    monkeypatch.setitem(compare_transformers.WIDTHS, name, TINY)
    monkeypatch.setitem(compare_transformers.TEXT_VOCABULARY, name, 100)
    monkeypatch.setitem(compare_transformers.GRIDS, name, 13)
    lines = run(compare_transformers, "--model", name, "--layers", "1", "--decoding", "ar", "sjd:window=2", *COMMON)
    assert any(line.startswith("12 greedy tokens") for line in lines)
    assert [line.split(" | ")[:2] for line in lines[-3:]] == [
        ["| transformers", "3"],
        ["| ar", "3"],
        ["| sjd:window=2", "3"],
    ]


def test_scaling_prints_every_window_and_draws_them(run, monkeypatch, tmp_path):
    monkeypatch.setitem(scaling.SIZES, "b", TINY | {"num_layers": 1})
    monkeypatch.setattr(scaling, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(scaling, "peak", lambda dtype, device: 1e9)
    plot = tmp_path / "scaling.png"
    lines = run(scaling, "--window", "2", "4", "--grid", "4", "--batch-size", "1", "2", "--out", str(plot), *COMMON)
    assert [line.split(" | ")[0] for line in lines if line[:3].strip("| ").isdigit()] == ["| 1", "| 2", "| 4"] * 2
    assert plot.stat().st_size > 1000


def test_the_floor_counts_weights_and_half_of_the_image():
    network = scaling.LlamaGenTransformer(grid_size=4, vocab_size=24, **TINY, num_layers=1)
    weights = 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32 + 24 * 32
    states = 2 * 32 * 8
    by_bytes, by_products = scaling.floors(network, rows=6, queries=5, tokens=8, rates=(1e3, 1e3))
    assert by_bytes == 4 * (weights + 6 * states)
    assert by_products == 2 * 6 * 5 * (weights + states)


@pytest.mark.parametrize("module", [compare_llamagen, compare_var])
def test_a_folder_that_is_no_clone_is_refused(module, run, tmp_path):
    with pytest.raises(SystemExit, match="--reference"):
        run(module, "--reference", str(tmp_path))


def test_tokens_that_are_not_greedy_are_refused():
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]])
    assert side_by_side.greedy_gap(logits, torch.tensor([[2, 0]])) == 0
    gap = side_by_side.greedy_gap(logits, torch.tensor([[2, 1]]))
    assert gap == pytest.approx(3 / float(logits.std()))
    with pytest.raises(SystemExit):
        side_by_side.check_gap(gap, 2, torch.float32)


def test_the_stages_of_a_hybrid_are_timed(run, monkeypatch):
    monkeypatch.setattr(hybrid_stages, "WIDTHS", TINY | {"head_dim": 16})
    monkeypatch.setattr(
        hybrid_stages,
        "DECODER_WIDTHS",
        {"hidden_size": 32, "num_attention_heads": 2, "num_kv_heads": 1, "axes_dim_rope": (4, 4, 8)},
    )
    monkeypatch.setattr(hybrid_stages, "VAE_WIDTHS", (32,) * 4)
    lines = run(hybrid_stages, "--layers", "2", "--grid", "3", "--size", "32", "--inference-steps", "2")
    assert lines[-3].startswith("decoding | passes | ms a pass | s of tokens")
    assert lines[-2].startswith("ar | 9 (9 to 9) | ") and lines[-1].startswith("sjd-coupled | ")
