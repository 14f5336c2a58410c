"""Text of a known length: words that are one token each, drawn by a key.

A word of at most five letters with the space before it is one token of the simulated engine, and these 256 are one of SmolLM2;
they are common enough to be so with any large vocabulary. `pipeline/bench/template.py` asks the running model.
"""

from functools import lru_cache
from hashlib import shake_128
from typing import Final

WORDS: Final = (
    "part", "time", "know", "like", "year", "help", "need", "work", "well", "high", "world", "form", "water",
    "sign", "make", "data", "call", "found", "count", "read", "lead", "fact", "test", "life", "find", "right",
    "writ", "grow", "main", "level", "great", "food", "start", "good", "class", "show", "power", "small", "allow",
    "care", "take", "organ", "human", "state", "point", "build", "play", "plan", "want", "cell", "pass", "hand",
    "place", "list", "feel", "light", "open", "mean", "keep", "name", "home", "stand", "move", "mark", "look",
    "type", "think", "group", "rest", "here", "area", "focus", "last", "turn", "fore", "land", "case", "local",
    "head", "post", "value", "order", "occur", "come", "text", "cost", "cause", "view", "press", "hard", "line",
    "tool", "plant", "role", "young", "step", "range", "book", "flow", "short", "space", "sing", "heart", "give",
    "paper", "mind", "field", "begin", "norm", "path", "full", "super", "side", "event", "sound", "near", "size",
    "hold", "lower", "meet", "word", "wind", "deep", "house", "team", "file", "live", "fall", "idea", "break",
    "soft", "color", "port", "share", "rate", "clear", "image", "whole", "avoid", "adult", "tell", "site", "check",
    "skin", "clean", "sense", "week", "love", "offer", "draw", "bring", "feed", "green", "fish", "diet", "face",
    "total", "unit", "soil", "farm", "thing", "link", "close", "extra", "enjoy", "heat", "issue", "stop", "slow",
    "fire", "code", "user", "adapt", "broad", "stay", "write", "basic", "input", "page", "talk", "shape", "visit",
    "cross", "camp", "force", "poll", "warm", "bill", "lack", "town", "cover", "cool", "pack", "game", "base",
    "night", "host", "wood", "poor", "gain", "tree", "table", "speak", "soon", "video", "waste", "agree", "road",
    "card", "rich", "front", "sold", "third", "raise", "reach", "goal", "fair", "load", "month", "fast", "speed",
    "novel", "mount", "room", "habit", "dark", "bound", "block", "stage", "trust", "graph", "limit", "birth",
    "date", "teach", "trade", "root", "essay", "deal", "serve", "hope", "task", "save", "leave", "rule", "guide",
    "miss", "scale", "fuel", "sugar", "style", "core", "cold", "rock", "equal", "layer",
)  # fmt: skip
"""256, so that a byte is a word."""

TEXTS_KEPT: Final = 2048
"""Of those that come back, as personas and blocks of a trace do: 10 KB each at most, as a rule."""


def words(key: str, count: int) -> list[str]:
    """`count` words, the same for the same key; of a longer draw the first ones."""
    return [WORDS[byte] for byte in shake_128(key.encode()).digest(count)]


@lru_cache(maxsize=TEXTS_KEPT)
def text(key: str, count: int) -> str:
    """Those words as a text."""
    return " ".join(words(key, count))
