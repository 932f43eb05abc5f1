"""Small models of icons for arimage that invent what they generate, and how they were trained."""

from pathlib import Path


__version__ = "0.1.0"

MODELS = Path(__file__).parent / "assets"
RECIPES = Path(__file__).parent / "recipes"
# What judges generated icons, see `arimage_icons.judge`.
JUDGE = MODELS / "icons-judge"
