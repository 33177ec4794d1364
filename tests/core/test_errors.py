"""What fedsim reads off errors of others."""

from fedsim.core.errors import follows_interrupt


class Falsy(Exception):
    def __len__(self) -> int:
        return 0


def test_an_error_follows_from_ctrl_c_by_its_causes() -> None:
    error, cause = SystemError(), Falsy()
    error.__cause__, cause.__context__ = cause, KeyboardInterrupt()
    assert follows_interrupt(error)


def test_an_error_that_is_its_own_cause_follows_from_nothing() -> None:
    error = ValueError()
    error.__cause__ = error
    assert not follows_interrupt(error)
