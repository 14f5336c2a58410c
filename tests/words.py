"""Words for prompts of which nothing is wanted but length and difference."""

from typing import Final

WORDS: Final = (
    "river", "stone", "market", "winter", "garden", "letter", "bridge", "window", "island", "summer", "paper", "engine",
    "forest", "mirror", "harbor", "silver", "morning", "valley", "candle", "record", "painter", "thunder", "village",
    "copper", "meadow", "lantern", "orchard", "compass", "feather", "granite",
)  # fmt: skip
