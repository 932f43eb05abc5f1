"""The seeds of images: numbers by which each of them can be generated again alone."""

import torch


# Seeds are below it: JSON and web pages hold these numbers exactly.
SEEDS = 2**53


def image_seeds(generator: torch.Generator, count: int) -> list[int]:
    """One seed per image, from the generator of a call. A generator on the same device that was just made with one of
    them, `manual_seed(seed)`, generates that image alone. The first seed of a generator that nobody has used yet is
    its own."""
    device, own = generator.device, generator.initial_seed()
    unused = torch.equal(generator.get_state(), torch.Generator(device).manual_seed(own).get_state())
    seeds = torch.randint(SEEDS, (count,), generator=generator, device=device).tolist()
    return [own, *seeds[1:]] if unused else seeds


def noise_key(seed: int, device: torch.device) -> int:
    """The key of the random numbers of the image with a seed (`decoding/contract/noise.py`)."""
    generator = torch.Generator(device).manual_seed(seed)
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=device))
