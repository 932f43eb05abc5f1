"""Images in memory, to train on."""

from dataclasses import dataclass

import torch

from arimage.training.resuming import of_data


@dataclass
class Images:
    """`Pixels` of images uint8 [M, 3, S, S] and their coverage uint8 [M, 1, S, S]; a batch is a random choice."""

    images: torch.Tensor
    alpha: torch.Tensor

    def __len__(self):
        return len(self.images)

    @property
    def size(self):
        return self.images.shape[-1]

    @property
    def about(self):
        return of_data(self)

    def read(self, images):
        return self.images[images], self.alpha[images]

    def batch(self, step, count, generator):
        return self.read(torch.randint(len(self), (count,), generator=generator).tolist())
