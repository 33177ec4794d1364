"""Imports without garbage collection leave the collector as it was, also after an error."""

import gc

import pytest

from fedsim.core.imports import quick_imports


def fail_to_import() -> None:
    with quick_imports():
        assert not gc.isenabled()
        raise ImportError


def test_the_collector_is_back_after_an_error():
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError):
            fail_to_import()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
