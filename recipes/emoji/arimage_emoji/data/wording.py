"""Captions of emoji as people type them: plain words for CLDR names, articles, plurals, and rare keywords."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

from ..training.captioned import COUNTRY_FLAG
from ..training.sentences import UNCOUNTABLE, with_article


# CLDR name to the words that people use for it; the first is the noun in counts, pairs and colours. A word may name
# several.
PLAIN_WORDS = {
    "airplane": "airplane, plane, aeroplane",
    "alarm clock": "alarm clock, clock",
    "alien": "alien, extraterrestrial",
    "alien monster": "space invader, monster, pixel monster",
    "american football": "football",
    "automobile": "car, auto, automobile",
    "backpack": "backpack, school bag, rucksack",
    "banana": "banana, fruit",
    "bear": "bear, bear face",
    "beer mug": "beer, glass of beer, beer mug",
    "bicycle": "bicycle, bike",
    "billed cap": "cap, baseball cap",
    "bird": "bird, little bird",
    "birthday cake": "birthday cake, cake",
    "black bird": "black bird, crow, raven",
    "blossom": "flower, yellow flower, blossom",
    "bouquet": "bouquet, flowers, bunch of flowers",
    "bread": "bread, loaf of bread",
    "broken heart": "broken heart, heartbreak",
    "butterfly": "butterfly",
    "cactus": "cactus, desert plant",
    "camera": "camera, photo camera",
    "castle": "castle, fortress",
    "cat": "cat, kitty, sitting cat",
    "cat face": "cat, kitten, cat head",
    "cherries": "cherries, two cherries",
    "chicken": "chicken, hen",
    "closed book": "book, red book",
    "closed umbrella": "closed umbrella, folded umbrella",
    "cloud": "cloud, white cloud",
    "cloud with rain": "rain, rainy weather, rain cloud",
    "cloud with lightning": "lightning, thunderstorm",
    "cloud with snow": "snow, snowfall",
    "clown face": "clown, clown face",
    "collision": "explosion, bang, boom",
    "cooking": "fried egg, egg in a pan, breakfast",
    "couch and lamp": "couch, sofa, living room",
    "cow": "cow, cattle",
    "cow face": "cow, cow head",
    "crescent moon": "moon, crescent moon, half moon, the moon",
    "crying face": "crying face, sad face, face with a tear",
    "deciduous tree": "tree, leafy tree, green tree",
    "delivery truck": "truck, lorry, delivery truck",
    "desktop computer": "computer, monitor, pc, desktop computer",
    "dog": "dog, puppy, standing dog",
    "dog face": "dog, dog head, puppy face",
    "doughnut": "donut, doughnut",
    "dove": "dove, white bird, peace dove",
    "dragon": "dragon, green dragon",
    "dragon face": "dragon head, dragon",
    "enraged face": "angry face, furious face, red face",
    "envelope": "envelope, letter, mail",
    "evergreen tree": "pine tree, tree, fir tree, conifer",
    "face blowing a kiss": "kiss face, blowing a kiss",
    "face screaming in fear": "screaming face, scared face, shocked face",
    "face vomiting": "vomiting face, sick face",
    "face with medical mask": "face with a mask, mask face, sick face",
    "face with tears of joy": "laughing face, someone laughing, tears of joy, crying with laughter",
    "fallen leaf": "autumn leaves, brown leaf, fallen leaf",
    "ferris wheel": "ferris wheel, big wheel",
    "fire": "fire, flame, flames",
    "fire engine": "fire truck, fire engine",
    "fish": "fish, blue fish",
    "fork and knife": "fork and knife, cutlery",
    "four leaf clover": "four leaf clover, lucky clover, clover",
    "fox": "fox, fox face",
    "french fries": "fries, french fries, chips",
    "frog": "frog, frog face, toad",
    "frowning face": "sad face, frowning face, unhappy face",
    "full moon": "full moon, moon, the moon",
    "game die": "die, dice",
    "gem stone": "diamond, gem, jewel",
    "ghost": "ghost, spooky ghost",
    "glass of milk": "glass of milk, milk",
    "glasses": "glasses, eyeglasses, spectacles",
    "globe showing Americas": "globe, earth, planet earth, world",
    "globe showing Europe-Africa": "globe, earth, planet earth, world",
    "glowing star": "glowing star, shining star",
    "grinning face": "happy face, grinning face, smiley",
    "grinning face with smiling eyes": "happy face, laughing face, someone laughing",
    "hamburger": "hamburger, burger, cheeseburger",
    "headphone": "headphones, pair of headphones",
    "high voltage": "lightning bolt, lightning, electricity",
    "horse": "horse, galloping horse",
    "horse face": "horse head, horse",
    "hot beverage": "cup of coffee, coffee, tea, hot drink",
    "hot dog": "hot dog, sausage in a bun",
    "house": "house, home, little house",
    "house with garden": "house with a tree, house with garden, house, home",
    "hundred points": "hundred, 100",
    "ice cream": "ice cream, ice cream sundae",
    "jack-o-lantern": "pumpkin, halloween pumpkin, jack-o-lantern",
    "jeans": "jeans, pants, trousers",
    "lady beetle": "ladybug, ladybird, beetle",
    "laptop": "laptop, notebook computer, computer",
    "light bulb": "light bulb, lamp, idea",
    "locked": "lock, padlock, closed lock",
    "locomotive": "steam train, locomotive, train",
    "loudly crying face": "crying face, sobbing face, weeping face",
    "man’s shoe": "shoe, brown shoe",
    "memo": "note, pencil and paper, memo",
    "mobile phone": "phone, smartphone, cell phone, mobile phone",
    "money bag": "bag of money, money, money bag",
    "monkey": "monkey, ape",
    "monkey face": "monkey face, monkey",
    "motor scooter": "scooter, moped",
    "mount fuji": "mount fuji, Fuji, volcano mountain",
    "mountain": "mountain",
    "mouse": "mouse, little mouse",
    "mouse face": "mouse face, mouse",
    "mushroom": "mushroom, toadstool, red mushroom",
    "musical note": "musical note, music, note",
    "national park": "landscape, park, nature",
    "oncoming automobile": "car from the front, oncoming car",
    "open book": "open book, book",
    "palm tree": "palm tree, palm, tropical tree",
    "panda": "panda, panda bear",
    "parrot": "parrot, colourful bird, green parrot",
    "party popper": "party, confetti, celebration",
    "pencil": "pencil, yellow pencil",
    "pig": "pig",
    "pig face": "pig face, pig",
    "pile of poo": "poop, poo, pile of poo",
    "pizza": "pizza, slice of pizza, pizza slice",
    "police car": "police car, cop car",
    "rabbit": "rabbit, bunny",
    "rabbit face": "rabbit face, bunny, bunny face",
    "red apple": "apple, red apple",
    "red heart": "heart, red heart, love heart",
    "ring": "diamond ring, ring, engagement ring, wedding ring",
    "robot": "robot, robot face, android",
    "rocket": "rocket, spaceship, space rocket",
    "rooster": "rooster, cock",
    "rose": "rose, red rose",
    "running shoe": "sneaker, running shoe, trainer",
    "sailboat": "sailboat, boat, sailing boat",
    "sauropod": "dinosaur, brontosaurus, long-necked dinosaur",
    "scissors": "scissors, pair of scissors",
    "shark": "shark, great white shark",
    "ship": "ship, boat on the water, ship on the water",
    "skull": "skull, human skull",
    "smiling face": "smiling face, smile",
    "smiling face with heart-eyes": "face with heart eyes, in love, heart eyes",
    "smiling face with horns": "devil, purple devil, smiling devil",
    "smiling face with smiling eyes": "smiling face, happy face, blushing smile",
    "smiling face with sunglasses": "face with sunglasses, cool face, smiley with sunglasses",
    "slightly smiling face": "smiley face, smile, smiling face",
    "snow-capped mountain": "mountain, snowy mountain, mountain with snow",
    "snowman": "snowman",
    "snowman without snow": "snowman",
    "soccer ball": "soccer ball, football, ball",
    "soft ice cream": "ice cream cone, soft ice cream",
    "spaghetti": "spaghetti, pasta, noodles",
    "sport utility vehicle": "SUV, blue car, jeep",
    "spouting whale": "spouting whale, whale spouting water",
    "star": "star, yellow star, gold star",
    "stop sign": "stop sign",
    "sun": "sun, sunshine, the sun",
    "sun with face": "smiling sun, sun with a face, sun",
    "sunflower": "sunflower, yellow flower, big yellow flower",
    "T-Rex": "T-Rex, tyrannosaurus, dinosaur",
    "t-shirt": "t-shirt, shirt, tee",
    "tangerine": "orange, mandarin, tangerine",
    "taxi": "taxi, cab, yellow taxi",
    "teddy bear": "teddy bear, teddy, stuffed bear",
    "telephone": "telephone, phone, old phone",
    "television": "television, tv",
    "thought balloon": "thought bubble, thinking bubble",
    "thumbs up": "thumbs up, like, thumb",
    "tiger": "tiger, walking tiger",
    "tiger face": "tiger face, tiger",
    "tomato": "tomato, red tomato",
    "tropical fish": "tropical fish, yellow fish",
    "trophy": "trophy, cup, golden cup",
    "tulip": "tulip, pink tulip, flower",
    "turtle": "turtle, tortoise",
    "umbrella": "umbrella, open umbrella",
    "umbrella with rain drops": "umbrella in the rain, umbrella",
    "unicorn": "unicorn, unicorn head",
    "watch": "watch, wristwatch",
    "whale": "whale, blue whale",
    "wine glass": "glass of wine, red wine, wine glass",
    "wolf": "wolf, wolf face",
    "woman’s hat": "hat, sun hat, straw hat",
    "wrapped gift": "gift, present, gift box",
    "black cat": "black cat",
    "elephant": "elephant, grey elephant",
    "mantelpiece clock": "mantel clock, antique clock",
    "seven o’clock": "clock, seven o'clock",
    "three o’clock": "clock, three o'clock",
}
# What people call flags of countries.
FLAG_WORDS = {
    "Argentina": "Argentine", "Australia": "Australian", "Austria": "Austrian", "Belgium": "Belgian",
    "Brazil": "Brazilian", "Canada": "Canadian", "Chile": "Chilean", "China": "Chinese", "Colombia": "Colombian",
    "Croatia": "Croatian", "Cuba": "Cuban", "Czechia": "Czech", "Denmark": "Danish", "Egypt": "Egyptian",
    "England": "English", "Estonia": "Estonian", "European Union": "EU", "Finland": "Finnish", "France": "French",
    "Germany": "German", "Greece": "Greek", "Hungary": "Hungarian", "Iceland": "Icelandic", "India": "Indian",
    "Indonesia": "Indonesian", "Iran": "Iranian", "Ireland": "Irish", "Israel": "Israeli", "Italy": "Italian",
    "Jamaica": "Jamaican", "Japan": "Japanese", "Kenya": "Kenyan", "Mexico": "Mexican", "Morocco": "Moroccan",
    "Netherlands": "Dutch", "Nigeria": "Nigerian", "North Korea": "North Korean", "Norway": "Norwegian",
    "Pakistan": "Pakistani", "Peru": "Peruvian", "Poland": "Polish", "Portugal": "Portuguese", "Romania": "Romanian",
    "Russia": "Russian", "Scotland": "Scottish", "South Africa": "South African", "South Korea": "Korean",
    "Spain": "Spanish", "Sweden": "Swedish", "Switzerland": "Swiss", "Thailand": "Thai", "Türkiye": "Turkish",
    "Ukraine": "Ukrainian", "United Kingdom": "British", "United States": "American", "Vietnam": "Vietnamese",
    "Wales": "Welsh",
}  # fmt: skip
COLOUR_WORDS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "grey")
TEMPLATES = ("{a}", "{a}", "an emoji of {a}", "{n} emoji", "a picture of {a}", "a drawing of {a}", "{n}, noto style")
_IRREGULAR = {"mouse": "mice", "goose": "geese", "ox": "oxen", "fish": "fish", "sheep": "sheep", "deer": "deer"} | {
    "bison": "bison", "moose": "moose", "squid": "squid", "shrimp": "shrimp", "wolf": "wolves", "leaf": "leaves",
    "knife": "knives", "scarf": "scarves", "tooth": "teeth", "potato": "potatoes", "tomato": "tomatoes",
    "mango": "mangoes", "die": "dice", "dress": "dresses", "axe": "axes",
}  # fmt: skip


def plain_words(name: str) -> list[str]:
    """The words that people use for what an emoji shows."""
    if name.startswith(COUNTRY_FLAG):
        country = name.removeprefix(COUNTRY_FLAG)
        words = [f"flag of {country}", f"the flag of {country}", f"{country} flag"]
        return words + [f"{FLAG_WORDS[country]} flag"] if country in FLAG_WORDS else words
    return PLAIN_WORDS.get(name, name).split(", ")


def noun_of(name: str) -> str:
    """What an emoji shows, without its colour: the word for counts, pairs and recoloured sprites."""
    noun = plain_words(name)[0]
    return re.sub(rf"^(light )?({'|'.join(COLOUR_WORDS)}) (?=\w)", "", noun)


def plural(noun: str) -> str:
    """The plural of a noun that `is_countable`."""
    start, space, last = noun.rpartition(" ")
    if last in _IRREGULAR:
        return start + space + _IRREGULAR[last]
    if last.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if last.endswith("y") and last[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def is_countable(noun: str) -> bool:
    """Whether the noun is one or two plain words in the singular."""
    last = noun.split()[-1]
    plural_already = last.endswith("s") and not last.endswith(("ss", "us"))
    plain = re.fullmatch(r"(?!mount )[a-z]+( [a-z]+)?", noun)
    return plain is not None and not plural_already and last not in UNCOUNTABLE


@cache
def written_captions() -> dict[str, list[str]]:
    """Captions that were written for this project, by the name of their picture."""
    lines = Path(__file__).with_name("written_captions.tsv").read_text(encoding="utf-8").splitlines()
    return {name: captions for name, *captions in (line.split("\t") for line in lines)}


def rare_keywords(keywords: list[list[str]], most: int = 3) -> list[list[str]]:
    """The keywords of each image that at most `most` images have. The others say too little."""
    counts = Counter(word for words in keywords for word in set(words))
    return [[word for word in words if counts[word] <= most] for words in keywords]


def captions_of(name: str, keywords: list[str]) -> list[str]:
    """Captions of one image, the plain name first; a caption that is listed twice is used twice as often."""
    words = plain_words(name)
    # "a flag: France" is not a sentence.
    called = words[0] if name.startswith(COUNTRY_FLAG) else name
    captions = [name, *(template.format(a=with_article(called), n=called) for template in TEMPLATES)]
    for word in words:
        captions += [word, with_article(word), f"a picture of {with_article(word)}"]
    captions += written_captions().get(name, ())
    captions += [word for word in keywords if word not in words]
    captions += [f"{name}, {word}" for word in keywords[:3]]
    return captions
