"""`benchmarks/checkpointed_layers.py`: what is counted."""

import checkpointed_layers
from transformers import LlamaConfig


def test_layers_that_are_computed_again_need_less_memory():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2, vocab_size=8
    )
    kept, again = (checkpointed_layers.measure(config, 4, 64, again) for again in (False, True))
    assert 0 < again < 0.5 * kept
