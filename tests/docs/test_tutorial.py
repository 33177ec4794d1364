"""The tutorial is run from its first line to its last."""

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_every_command_of_the_tutorial_prints_what_the_page_shows(
    run_page: Callable[[str], None],
) -> None:
    run_page("docs/start/tutorial.md")
