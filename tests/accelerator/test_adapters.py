"""Adapters on an accelerator, where replayed steps hold the scales that they were captured with."""

import card
import pytest
import torch
from accelerator.runs import FAMILIES, call, differences, small
from adapters import STYLE, adapter


pytest.importorskip("peft", reason="the extra `lora` is not installed")
# The linear layers of one block, each with its adapter.
CHANGES = {
    "scale": lambda pipe: pipe.set_adapters(STYLE, 0.5),
    "off": lambda pipe: pipe.disable_lora(),
    "fused": lambda pipe: (pipe.enable_lora(), pipe.set_adapters(STYLE, 1.0), pipe.fuse_lora()),
    "unfused": lambda pipe: pipe.unfuse_lora(),
    "unloaded": lambda pipe: pipe.unload_lora_weights(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["var-text", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llamagen-text", "emu3"))]
)
def test_replayed_steps_follow_adapters(family):
    with torch.no_grad():
        plain, replayed = FAMILIES[family](), FAMILIES[family]()
    state = adapter(plain, targets="proj")
    for pipe in (plain, replayed):
        pipe.load_lora_weights(state, STYLE)
    card.move(replayed, "cuda")
    text = small("next-scale" if family == "var-text" else "sjd-coupled")
    found, seen = {}, []
    for name, change in {"loaded": lambda pipe: None, **CHANGES}.items():
        change(plain)
        expected = call(plain, text)
        with card.card():
            change(replayed)
            # The second one replays what the first one captured.
            for _ in range(2):
                found[name] = differences(expected, call(replayed, text))
        seen.append(expected["tokens"])
    assert {name: each for name, each in found.items() if each} == {}
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[-1])
