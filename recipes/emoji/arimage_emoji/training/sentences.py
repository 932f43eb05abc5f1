"""Captions of a batch, each a variant of its picture's captions, some as parts of sentences that people write."""

import torch


NUMBERS = {2: "two", 3: "three", 4: "four"}
ADJECTIVES = tuple(
    (
        "big small little cute simple nice pretty funny tiny large huge lovely beautiful great good pleasant gorgeous "
        "adorable fancy plain basic typical normal ordinary regular classic standard perfect wonderful amazing "
        "awesome fine neat tidy charming detailed cartoon stylish delightful proper"
    ).split()
)
# Sentences around a caption.
FRAMES = (
    "i want {a}", "{a} please", "a cartoon of {a}", "a nice drawing of {a}", "{a} on a white background",
    "can you draw {a}", "draw {a}", "draw me {a}", "please draw {a} for me", "a picture of {a}",
    "a small picture of {a}", "an image of {a}", "a photo of {a}", "an icon of {a}", "an icon showing {a}",
    "a drawing of {a}", "a sketch of {a}", "an illustration of {a}", "a simple illustration of {a}",
    "clip art of {a}", "a sticker of {a}", "make {a}", "make me {a}", "make a picture of {a}", "create {a}",
    "create an image with {a}", "generate {a}", "generate a picture of {a}", "give me {a}",
    "could you make {a} for me", "can i have {a}", "can i see {a}", "i need {a}", "i need an icon with {a}",
    "i would like {a}", "i'd like to see {a}", "let me see {a}", "let's see {a}", "how about {a}", "paint {a}",
    "there is {a}", "this is {a}", "it shows {a}", "here you can see {a}", "just {a}", "{a} in cartoon style",
    "{a} as an icon",
)  # fmt: skip
# Names of what cannot be counted, or is more than one already.
UNCOUNTABLE = set(
    "bacon bread broccoli butter celery coal cooking corn curry custard fire fog garlic gear ginger ice lightning "
    "mate meat milk money popcorn rain rice salt sand scissors seaweed snow soap spaghetti sushi wood yarn mail "
    "glasses headphones jeans fries shorts briefs socks gloves goggles chopsticks grapes cherries peanuts "
    "blueberries beans maracas skis sky foggy desert cinema camping stadium cityscape volcano rainbow tornado "
    "sunrise sunset fireworks pancakes houses books chains badminton lacrosse tennis luggage dna cattle "
    "coffee tea".split()
)


def with_article(phrase: str) -> str:
    """The phrase with "a" or "an", unless it is plural, cannot be counted or has one."""
    last, first = phrase.split()[-1], phrase.split()[0]
    if last in UNCOUNTABLE or first in (*NUMBERS.values(), "in", "mount", "the") or not first[0].isalpha():
        return phrase
    if last.endswith("s") and not last.endswith(("ss", "us", "is", "lens")):
        return phrase
    vowel = first[0] in "aeiouAEIOU" and not first.startswith(("uni", "eu", "ew", "one", "use"))
    return f"{'an' if vowel else 'a'} {phrase}"


def sample_captions(
    captions: list[list[str]],
    index: torch.LongTensor,
    generator: torch.Generator,
    *,
    primary_share: float = 0.5,
    framed_share: float = 0.0,
) -> list[str]:
    """A caption per image of `index`: `primary_share` of them the primary one, else any of its variants;
    `framed_share` of these in one of `FRAMES`, every second with one of `ADJECTIVES`."""
    chosen = []
    for i, row in zip(index.tolist(), torch.rand(len(index), 5, generator=generator).tolist(), strict=True):
        variant, primary, framed, adjective, frame = row
        caption = captions[i][0 if primary < primary_share else int(variant * len(captions[i]))]
        if framed < framed_share:
            article, space, rest = caption.partition(" ")
            if article in ("a", "an") and adjective < 0.5:
                caption = with_article(f"{ADJECTIVES[int(2 * adjective * len(ADJECTIVES))]} {rest}")
            caption = FRAMES[int(frame * len(FRAMES))].format(a=caption)
        chosen.append(caption)
    return chosen
