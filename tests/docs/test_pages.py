"""What compares a page with what is printed: it must see every change that a reader would."""

from collections.abc import Callable

import pytest

Differs = Callable[[str, str], str | None]

PRINTED = """\
tiny: completed after 2 rounds in 1.5 s
test accuracy 90.8%, test loss 0.2758
every client within ε = 8 at δ = 0.001
report: runs/x/report.html
"""


@pytest.mark.parametrize(
    "shown",
    [
        PRINTED,
        PRINTED.replace("1.5 s", "37.2 s"),
        PRINTED.replace("1.5 s", "96 ms"),
        PRINTED.replace("1.5 s", "2 min 4 s"),
        PRINTED.replace("90.8%", "90.3%"),
        PRINTED.replace("0.2758", "0.274"),
        PRINTED.replace("\n", "  \n  "),
        "...\nevery client within ε = 8 at δ = 0.001\n...\n",
        "tiny: completed after 2 rounds in 9 s\n...\nreport: runs/x/report.html\n",
        "...\n",
    ],
)
def test_equal_up_to_declared_tolerances(differs: Differs, shown: str) -> None:
    assert differs(shown, PRINTED) is None


@pytest.mark.parametrize(
    "shown",
    [
        "",
        PRINTED.replace("2 rounds", "3 rounds"),
        PRINTED.replace("90.8%", "91.6%"),
        PRINTED.replace("0.2758", "0.246"),
        PRINTED.replace("ε = 8", "ε = 7.99"),
        PRINTED.replace("0.001", "0.0011"),
        PRINTED.replace("1.5 s", "fast s"),
        PRINTED.replace("1.5 s", "1.5"),
        PRINTED.splitlines()[0],
        "...\nevery client within ε = 8 at δ = 0.001\n",
        "every client within ε = 8 at δ = 0.001\n...\n",
        "...\nreport: runs/x/report.html\n...\nevery client within ε = 8 at δ = 0.001\n...\n",
        PRINTED + "more\n",
    ],
)
def test_every_other_difference_is_seen(differs: Differs, shown: str) -> None:
    assert differs(shown, PRINTED) is not None
    assert differs(PRINTED, shown) is not None
