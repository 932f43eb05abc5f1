"""What a dry run estimates."""

import pytest
from eval.runs.run_kit import COUNT, options, part_of
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.eval.runs import estimate
from arimage.eval.runs.generate import make_config
from arimage.eval.runs.manifest import prompt_rows


@pytest.mark.parametrize(("model", "passes"), [("text", 16), ("scales", 4)])
def test_a_dry_run_says_what_a_run_does_and_writes_nothing(command, models, tmp_path, model, passes):
    decoding = [] if model == "scales" else ["--decoding", "ar"]
    code, said = command(*options(models, tmp_path / "run", "--dry-run", *decoding, model=model))
    assert code == 0 and not (tmp_path / "run").exists()
    assert f"images: {COUNT} of 8x8 pixels, of which 0 are finished" in said
    assert f"steps: {passes}.0 forward passes per image" in said and "(all)" in said
    assert f"{COUNT} PNG files" in said and "hours with 1 process\n" in said


def test_a_dry_run_estimates_the_steps_that_it_does_not_take(monkeypatch):
    pipe = tiny_llamagen.text_pipeline(grid=8)
    rows = prompt_rows([{"prompt": "a red heart"}] * 6, 0)
    config = make_config(pipe, rows, model="m", source={}, seed=0, batch_size=2, decoding="ar")
    monkeypatch.setattr(estimate, "PASSES", 9)
    cost = estimate.measure_batch(pipe, config, rows)
    assert (cost.measured, cost.finished, cost.passes, cost.size) == (9, False, 64.0, (16, 16))
    assert cost.seconds == pytest.approx(cost.other_seconds + 63 * cost.pass_seconds) and cost.pass_seconds > 0


def test_a_dry_run_of_a_run_that_has_begun_counts_what_is_left(command, models, undisturbed, tmp_path):
    run = part_of(undisturbed, tmp_path / "run", 2)
    code, said = command(*options(models, run, "--dry-run"))
    assert code == 0 and "of which 8 are finished" in said
    code, said = command(*options(models, run, "--dry-run", "--seed", 1))
    assert code == 2 and "and you ask for" in said
