"""The rows of a manifest and their seeds."""

from arimage.eval.runs.manifest import image_seed, prompt_rows


def test_a_seed_depends_on_the_run_and_the_image_alone():
    # A change here changes the images of every run that has been started.
    assert (image_seed(0, 0), image_seed(1, 10)) == (6213027144842677344, 6466448468994320724)
    seeds = [image_seed(seed, id) for seed in range(10) for id in range(1000)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_rows_of_prompts():
    rows = prompt_rows([{"prompt": "a", "tag": 1}, {"prompt": "b"}], seed=5, per_prompt=2)
    assert [(row["id"], row["prompt"], row.get("metadata")) for row in rows] == [
        (0, "a", {"tag": 1}),
        (1, "a", {"tag": 1}),
        (2, "b", None),
        (3, "b", None),
    ]
    assert [row["path"] for row in rows] == [f"images/{id:06d}.png" for id in range(4)]
    assert [row["seed"] for row in rows] == [image_seed(5, id) for id in range(4)]
