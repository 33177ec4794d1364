"""ε of the MNIST examples of Opacus and TensorFlow Privacy: rates, noise and steps alone.

Read at commits 4d0ebc8 of github.com/pytorch/opacus and 03035d5 of github.com/tensorflow/privacy.
"""

from experiments.reproductions.rows import Row, Unit, context_row, number_row
from experiments.reproductions.study import Setup, Study
from fedsim.accountant import Gaussian, MomentsAccountant, PldAccountant, PoissonSampled

EXAMPLES, DELTA = 60_000, 1e-5
# library, batch, noise multiplier, epochs, published ε
PUBLISHED = (
    ("Opacus", 240, 1.3, 15, 1.16),
    ("Opacus", 240, 1.1, 60, 2.91),
    ("Opacus", 240, 0.7, 45, 6.86),
    ("TensorFlow Privacy", 256, 1.3, 15, 1.19),
    ("TensorFlow Privacy", 256, 1.1, 60, 3.01),
    ("TensorFlow Privacy", 256, 0.7, 45, 7.10),
)


def measure(setup: Setup) -> list[Row]:
    """Return a row for each example; they are formulas, so both sizes are the same."""
    rows = []
    for library, batch, noise, epochs, epsilon in PUBLISHED:
        event, steps = PoissonSampled(batch / EXAMPLES, Gaussian(noise)), epochs * EXAMPLES // batch
        published, tight = MomentsAccountant(), PldAccountant()
        for accountant in (published, tight):
            accountant.compose(event, count=steps)
        where = f"{library}: σ = {noise}, {epochs} epochs of batches of {batch}"
        value = published.get_epsilon(DELTA)
        rows.append(number_row(f"ε, {where}", epsilon, value, tolerance=0.03))
        rows.append(context_row(f"tight ε, {where}", Unit().text(tight.get_epsilon(DELTA))))
    return rows


SETTINGS = (
    "As published: 60,000 examples, δ = 1e-5 (Opacus, examples/mnist_README.md:46-62; TensorFlow "
    "Privacy, tutorials/README.md:123-128). Both tables were made with the conversion of Rényi "
    "DP of Mironov 2017, which is that of `accountant: moments`; today's conversion "
    "(opacus/accountants/analysis/rdp.py:289-335), and privacy loss distributions even more, "
    "give less for the same noise. Needs no images: ε depends on sampling rate, noise and number "
    "of steps alone."
)

STUDIES = {
    "opacus_mnist_epsilon": Study(
        title="ε of the MNIST examples of Opacus and TensorFlow Privacy",
        source="Opacus, examples/mnist_README.md; TensorFlow Privacy, tutorials/README.md",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 1, "full": 1},
    ),
}
