"""Synthetic text from a small grammar, for tests and demonstrations.

Each document is about one villager. Trades go with places, tools and goods, and animals with sounds
and food, in all documents; a villager's name, trade and animal stay the same within a document. So
there is something to learn within a sentence, and from one sentence to the next.

    python -m examples.bert.text village.txt
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from ftmesh.files import write_text

NUM_DOCUMENTS = 700  # some 400 kB

TRADES = {  # place, tool, product
    "baker": ("bakery", "oven", "bread"),
    "smith": ("forge", "hammer", "horseshoes"),
    "weaver": ("mill", "loom", "cloth"),
    "carpenter": ("workshop", "saw", "tables"),
    "fisher": ("harbour", "net", "dinner"),
    "gardener": ("orchard", "spade", "apples"),
    "potter": ("studio", "wheel", "jugs"),
    "tailor": ("attic", "needle", "coats"),
    "miner": ("quarry", "pickaxe", "gravel"),
    "brewer": ("cellar", "barrel", "cider"),
}
ANIMALS = {  # sound, food
    "dog": ("barks", "bones"),
    "cat": ("purrs", "mice"),
    "horse": ("neighs", "oats"),
    "goat": ("bleats", "thistles"),
    "duck": ("quacks", "snails"),
    "crow": ("caws", "seeds"),
    "pig": ("grunts", "acorns"),
    "sheep": ("baas", "clover"),
}
NAMES = {
    "she": ("anna", "berta", "clara", "dora", "edith", "frida", "greta", "hanna", "ida", "julia"),
    "he": ("adam", "bruno", "carl", "david", "emil", "felix", "georg", "hugo", "ivan", "jakob"),
}
POSSESSIVE = {"she": "her", "he": "his"}
COLOURS = ("red", "green", "blue", "white", "black", "brown", "yellow", "grey")
SEASONS = {"spring": "rain", "summer": "heat", "autumn": "wind", "winter": "snow"}
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
NUMBERS = ("two", "three", "four", "five", "six", "seven")


def synthetic_documents(num_documents: int = NUM_DOCUMENTS, seed: int = 0) -> list[list[str]]:
    """Return documents, each a list of sentences."""
    rng = np.random.default_rng([seed, num_documents])
    return [_document(rng) for _ in range(num_documents)]


def _document(rng: np.random.Generator) -> list[str]:
    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    they = pick(tuple(NAMES))
    their, name, colour, day = POSSESSIVE[they], pick(NAMES[they]), pick(COLOURS), pick(DAYS)
    trade, animal = pick(tuple(TRADES)), pick(tuple(ANIMALS))
    (place, tool, goods), (sound, food) = TRADES[trade], ANIMALS[animal]

    def sentence() -> str:
        season = pick(tuple(SEASONS))
        friend = pick(tuple(TRADES))
        return pick(
            (
                f"{they} goes to the {place} with {their} {tool} every {day} .",
                f"in the {place} {name} makes {goods} with the {tool} .",
                f"a {trade} like {name} needs a good {tool} .",
                f"{they} sells {pick(NUMBERS)} baskets of {goods} on {day} .",
                f"{their} {animal} is {colour} and {sound} at the {trade} .",
                f"the {colour} {animal} {sound} when {they} brings {food} .",
                f"{name} gives {food} to the {animal} in {season} .",
                f"when {season} brings {SEASONS[season]} , {name} stays in the {place} .",
                f"the {friend} gives {TRADES[friend][2]} to {name} for {goods} .",
                f"on {day} the {friend} comes from the {TRADES[friend][0]} to see {name} .",
                f"{they} wears a {colour} hat and {their} {animal} eats {food} .",
            )
        )

    opening = f"{name} is a {trade} and has a {colour} {animal} ."
    return [opening, *(sentence() for _ in range(rng.integers(6, 14)))]


def main(argv: Sequence[str]) -> int:
    """Write the text: one sentence per line, and an empty line between documents."""
    if len(argv) != 1:
        print("usage: python -m examples.bert.text FILE", file=sys.stderr)
        return 2
    documents = ["\n".join(sentences) for sentences in synthetic_documents()]
    write_text(argv[0], "\n\n".join(documents) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
