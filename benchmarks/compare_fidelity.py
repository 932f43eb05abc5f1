"""Scores of features next to torch-fidelity: the same features, one process, in turn. pip install torch-fidelity

The features are made up, with the number and the falling spread of those of a network. The first table is of
everything that `arimage eval score --metrics fid` computes of 5,000 pictures and as many of the reference, the second
of four metrics. Ours have standard errors, and `fid-infinity`, density and coverage, which theirs do not have; the
distances are checked to be equal before. The other tables are of the Fréchet distances of all metrics: one distance,
and with its error and its limit for infinitely many images.

OMP_NUM_THREADS=1 python benchmarks/compare_fidelity.py --threads 1
"""

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from side_by_side import begin, in_turn, print_runs
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from arimage.eval.metrics.frechet import FrechetDistance, Gaussian, frechet_distance
from arimage.eval.metrics.inception_score import inception_score
from arimage.eval.metrics.kernel_distance import kernel_distance
from arimage.eval.metrics.neighbourhoods import neighbourhoods


WIDTH, CLASSES = 2048, 1008
CATEGORY = "fid-category"
# Images, and features of each.
DISTANCES = {
    "fid": (5000, WIDTH),
    "sfid": (5000, 2023),
    "fd-dinov2": (5000, 1024),
    "fvd": (2000, 400),
    CATEGORY: (500, WIDTH),
}
TABLES = ["fid-next-to-torch-fidelity", "all-next-to-torch-fidelity", *DISTANCES]


def features(count: int, width: int, seed: int) -> np.ndarray:
    """Correlated features [count, width] of falling spread, none below 0."""
    rng, shared = np.random.default_rng(seed), np.random.default_rng(width)
    mix = shared.normal(size=(width, width)) / np.arange(1, width + 1)[:, None] ** 0.5
    found = np.abs(rng.normal(size=(count, width)).astype(np.float32) @ mix.astype(np.float32) / 4 + 0.1 * seed)
    return found.astype(np.float32)


def our_fid(ours: np.ndarray, reference: np.ndarray, device: str) -> float:
    distance = FrechetDistance(ours, Gaussian.of_features(reference, device))
    distance.infinity()
    return distance.estimate().value


def their_fid(ours: np.ndarray, reference: np.ndarray) -> float:
    statistics = [fid_features_to_statistics(torch.from_numpy(one)) for one in (ours, reference)]
    return fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]


def tabulate(title: str, calls: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> None:
    def counted(call: Callable[[], object]) -> int:
        call()
        return 1

    print(f"\n{title}")
    runs = in_turn({name: partial(counted, call) for name, call in calls.items()}, repeats, device)
    print_runs(runs, "score", [next(iter(calls))])


def compare_with_torch_fidelity(count: int, every: bool, repeats: int, device: torch.device) -> None:
    """Check that the distances are equal, and time the FID, or also KID, precision, recall and the Inception score."""
    x, y = features(count, WIDTH, 1), features(count, WIDTH, 0)
    logits = x @ np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype(np.float32) / 30
    ours, theirs = our_fid(x, y, str(device)), their_fid(x, y)
    print(f"\nFID of {count} pictures: {ours:.6f} here, {theirs:.6f} of torch-fidelity")
    if abs(ours - theirs) > 1e-4 * theirs:
        raise SystemExit("the two do not compute the same: there is nothing to compare")

    def run_theirs() -> None:
        their_fid(x, y)
        if every:
            one, other = torch.from_numpy(x), torch.from_numpy(y)
            kid_features_to_metric(one, other, verbose=False)
            prc_features_to_metric(one, other, verbose=False)
            isc_features_to_metric(torch.from_numpy(logits))

    def run_ours() -> None:
        our_fid(x, y, str(device))
        if every:
            kernel_distance(x, y)
            neighbourhoods(x, y)
            inception_score(logits)

    title = "fid, kid, precision and recall, isc" if every else "fid"
    tabulate(title, {"torch-fidelity": run_theirs, "arimage": run_ours}, repeats, device)


def compare_with_one_distance(metric: str, repeats: int, device: torch.device) -> None:
    """Time a distance, and the same with its error."""
    x, y = (features(*DISTANCES[metric], seed) for seed in (1, 0))
    calls = {
        "one distance": lambda: frechet_distance(x, Gaussian.of_features(y, str(device))),
        "with its error and limit": partial(our_fid, x, y, str(device)),
    }
    tabulate(f"{metric}: {len(x)} of {x.shape[1]} features", calls, repeats, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each, after one that is not timed")
    parser.add_argument("--threads", type=int, help="of torch; NumPy takes OMP_NUM_THREADS")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=5000, help="of the tables next to torch-fidelity")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    arguments = parser.parse_args()
    device = begin(arguments)
    for table in arguments.tables:
        if table in DISTANCES:
            compare_with_one_distance(table, arguments.repeats, device)
        else:
            every = table == "all-next-to-torch-fidelity"
            compare_with_torch_fidelity(arguments.images, every, arguments.repeats, device)


if __name__ == "__main__":
    main()
