"""The metrics of this distribution, as `arimage eval score --metrics` names them."""

import numpy as np

from arimage.eval.figures import choice_entries
from arimage.eval.job import Job, write_scores
from arimage.eval.metrics.standard_errors import mean_estimate

from .clip_checks import questions_of
from .composition import check_run
from .emoji_kid import EmojiExtractor, asked_features, emoji_kernel_distance
from .reference import REFERENCE, read_gallery
from .retrieval import emoji_retrieval
from .videos import check_run as check_videos


def emoji_kid(job: Job) -> dict[str, dict]:
    reference, prompts = asked_features(job.run), [row["prompt"] for row in job.rows]
    extractor = EmojiExtractor(device=job.device)
    estimate = emoji_kernel_distance(job.extract(extractor), reference, prompts)
    label = f"{REFERENCE.name}: the pictures of the prompts, of {len(np.unique(reference, axis=0))}"
    return {"emoji-kid": job.entry(estimate, label, extractor.space)}


def retrieval(job: Job) -> dict[str, dict]:
    gallery, names = read_gallery()
    hits, label = (
        emoji_retrieval(job.run, gallery, names).numpy(),
        f"{REFERENCE.name}: gallery of {len(names)} pictures",
    )
    entries = {}
    for name, found in (("retrieval", hits[:, 0]), ("retrieval-top-5", hits.any(1))):
        write_scores(job.run, name, found)
        entries[name] = job.entry(mean_estimate(found, job.prompts), label, None)
    return entries


def checks(job: Job) -> dict[str, dict]:
    gallery, names = read_gallery()
    outcomes = check_run(job.run, gallery, names)
    write_scores(job.run, "checks", np.array([all(outcome.values()) for outcome in outcomes]))
    label, entries = f"{REFERENCE.name}: gallery of {len(names)} pictures", {}
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome):
        some = np.flatnonzero([name in outcome for outcome in outcomes])
        hits = np.array([outcomes[id][name] for id in some])
        entries[name] = job.entry(mean_estimate(hits, job.of_prompts(some)), label, None, some)
    return entries


def clip_checks(job: Job) -> dict[str, dict]:
    questions = [questions_of({"prompt": row.get("prompt"), **row.get("metadata", {})}) for row in job.rows]
    return choice_entries(job, "clip-checks", questions)


def videos(job: Job) -> dict[str, dict]:
    gallery, names = read_gallery()
    scores = check_videos(job.run, gallery, names)
    label, entries = f"{REFERENCE.name}: gallery of {len(names)} pictures", {}
    for name in scores[0]:
        values = np.array([one[name] for one in scores])
        write_scores(job.run, name, values)
        entries[name] = job.entry(mean_estimate(values, job.prompts), label, None)
    return entries
