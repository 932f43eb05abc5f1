"""Small models of emoji for arimage: their weights, recipes and metrics, which arimage finds by entry points."""

from pathlib import Path

from arimage.settings.installed import Prompts


__version__ = "0.1.0"

_HERE = Path(__file__).parent
MODELS, RECIPES, PROTOCOLS = _HERE / "assets", _HERE / "recipes", _HERE / "protocols"
REFERENCE = MODELS / "emoji-reference"
EMOJI = Prompts(REFERENCE / "prompts.jsonl", ["emoji-kid", "retrieval"])
EMOJI_CHECKS = Prompts(REFERENCE / "checks.jsonl")
EMOJI_VIDEOS = Prompts(REFERENCE / "videos.jsonl", ["videos"])
