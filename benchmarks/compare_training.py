"""A training step of LlamaGen next to its original's: the same random weights and tokens, one process, in turn.

The original is a clone of https://github.com/FoundationVision/LlamaGen, whose model, losses, clipping, AdamW and
average of weights run as in its `train_c2i.py` without compilation. Ours is the step of `arimage train model`. Both
train weights in float32, in bfloat16 under autocast. Before anything is timed, the two losses are compared.

git clone https://github.com/FoundationVision/LlamaGen
python benchmarks/compare_training.py --reference LlamaGen --batch-size 4
"""

import copy

import torch
import torch.nn.functional as F
from side_by_side import add_reference, begin, cases, in_turn, make_parser, print_runs
from torch import nn

from arimage.pipelines.llamagen.convert import llamagen_transformer_from_original
from arimage.training.loop import MasterWeights, OptimizerSettings


SIDE, CLASSES = 16, 1000
SETTINGS = OptimizerSettings(steps=10**6, learning_rate=1e-4, weight_decay=0.05, schedule="constant", ema_decay=0.9999)


def mixed(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def original_step(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, count: int, dtype: torch.dtype):
    average = copy.deepcopy(model).requires_grad_(False)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.learning_rate, betas=SETTINGS.betas, fused=True)

    def step() -> int:
        for _ in range(count):
            with mixed(tokens.device, dtype):
                _, loss = model(cond_idx=labels, idx=tokens[:, :-1], targets=tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.gradient_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.mul_(SETTINGS.ema_decay).add_(new, alpha=1 - SETTINGS.ema_decay)
        return count * len(tokens)

    return step


def own_step(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, count: int, dtype: torch.dtype):
    weights, taken = MasterWeights(model, SETTINGS), [0]
    weights.use_masters()

    def step() -> int:
        for _ in range(count):
            with mixed(tokens.device, dtype):
                loss = own_loss(model, tokens, labels)
            loss.backward()
            weights.step(taken[0])
            taken[0] += 1
        return count * len(tokens)

    return step


@torch.no_grad()
def original_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Without dropout, which it has in training only, as it has losses."""
    model.train()
    dropout, model.cls_embedding.dropout_prob = model.cls_embedding.dropout_prob, 0
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
    _, loss = model(cond_idx=labels, idx=tokens[:, :-1], targets=tokens)
    model.cls_embedding.dropout_prob = dropout
    return float(loss)


def own_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    unconditional = torch.rand(len(labels), device=labels.device) < 0.1
    logits = model.predict(tokens, class_labels=labels, unconditional=unconditional if model.training else None)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--reference", required=True, help="folder of a clone of the original")
    parser.add_argument("--steps", type=int, default=2, help="training steps of each timed call")
    arguments = parser.parse_args()
    add_reference(arguments.reference, "autoregressive/models/gpt.py")
    device = begin(arguments)
    from autoregressive.models.gpt import GPT_models

    for dtype, batch in cases(arguments):
        torch.manual_seed(0)
        original = GPT_models["GPT-B"](block_size=SIDE**2).to(device).eval()
        nn.init.normal_(original.output.weight, std=0.02)
        converted = llamagen_transformer_from_original(original.state_dict(), image_size=16 * SIDE, downsample=16)
        # With the names of those that were defaults, `from_config` ignores others in their place.
        config = {name: value for name, value in converted.config.items() if not name.startswith("_")}
        ours = type(converted).from_config(config | {"dropout": 0.1}).to(device, dtype).eval()
        ours.load_state_dict(converted.state_dict())
        tokens = torch.randint(16384, (batch, SIDE**2), device=device)
        labels = torch.randint(CLASSES, (batch,), device=device)
        with mixed(device, dtype):
            losses = [original_loss(original, tokens, labels), float(own_loss(ours, tokens, labels).detach())]
        print(f"{dtype}, {batch} images. Losses: {losses[0]:.5f} of the original, {losses[1]:.5f} of ours.")
        if abs(losses[0] - losses[1]) > (1e-3 if dtype == torch.float32 else 2e-2):
            raise SystemExit("the two do not compute the same: there is nothing to compare")
        calls = {
            "original": original_step(original.train(), tokens, labels, arguments.steps, dtype),
            "arimage": own_step(ours.train(), tokens, labels, arguments.steps, dtype),
        }
        print_runs(in_turn(calls, arguments.repeats, device), "image", ["original"])


if __name__ == "__main__":
    main()
