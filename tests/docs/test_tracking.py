"""The tracker that the page shows is a real one."""

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_the_page_prints_what_it_shows(run_page: Callable[[str], None]) -> None:
    run_page("docs/howto/tracking.md")
