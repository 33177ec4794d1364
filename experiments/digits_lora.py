"""Clients' digits upside down, and a backbone that public digits the right way up have trained.

`python digits_lora.py` trains it again and writes `digits_backbone.safetensors`.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

NUM_PUBLIC = 400
BACKBONE = Path(__file__).with_name("digits_backbone.safetensors")


def load(seed=0):
    """Return the clients' digits; the public ones are not among them."""
    x, y = load_digits(return_X_y=True)
    images = x[NUM_PUBLIC:].reshape(-1, 1, 8, 8)[:, :, ::-1] / 16
    return np.ascontiguousarray(images), y[NUM_PUBLIC:]


def train_backbone():
    """Write the weights of an mlp that was trained on public digits."""
    import torch
    from safetensors.torch import save_file
    from torch import nn

    x, y = load_digits(return_X_y=True)
    inputs = torch.tensor(x[:NUM_PUBLIC] / 16, dtype=torch.float32)
    targets = torch.tensor(y[:NUM_PUBLIC])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    save_file(model.state_dict(), BACKBONE)


if __name__ == "__main__":
    train_backbone()
