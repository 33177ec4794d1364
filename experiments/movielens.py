"""A score for each film of MovieLens: a rating is the middle of the scale plus this score."""

import torch
from torch import Tensor, nn


class FilmScores(nn.Module):
    """A learnt score for each film, from 0; the user of a rating is not used."""

    def __init__(self, films: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.scores = nn.Embedding(films, 1)
        nn.init.zeros_(self.scores.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the predicted ratings (n,) in stars, of pairs (n, 2) of a user and a film."""
        films = torch.clamp(pairs[:, 1], max=self.scores.num_embeddings - 1)
        return self.start + self.scores(films).squeeze(-1)


def build(films: int = 1682, start: float = 3.0) -> nn.Module:
    """Return the model.

    Args:
        films: number of scores; 1 gives all films the same score.
        start: rating in stars of a film without ratings, a public constant. 3 is the middle of 1 to
            5.
    """
    return FilmScores(films, start)
