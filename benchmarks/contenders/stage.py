"""A contender in a process of its own: nobody's threads, memory or library versions meet another's.

Imported, this module starts the process; started, it is the process. They speak JSON, a line each.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

_BENCHMARKS = Path(__file__).resolve().parent.parent
_SETTLE = 0.2  # seconds after a pause: what was due meanwhile is done first


class LeftOutError(RuntimeError):
    """A contender that cannot take part here; the message says why."""


class Stage:
    """One contender, getting ready for its rounds; others can be started meanwhile.

    Outside its turns it is paused, with all its processes: those of a Ray that has nothing to do
    still take six percent of a core, which would be missed where all cores are at work.

    Args:
        key: its name in `CONTENDERS`.
        work: what it does in each round.
        checkout: the root of another checkout, whose contender and fedsim run; None: this one's.

    Raises:
        LeftOutError: no interpreter is named that it is installed for.
    """

    def __init__(self, key: str, work: Any, checkout: Path | None = None) -> None:
        from contenders import CONTENDERS

        entry = CONTENDERS[key]
        python = entry.python()
        if python is None:
            raise LeftOutError(f"{entry.interpreter} names no interpreter that it is installed for")
        stage, environment = Path(__file__).resolve(), dict(os.environ)
        if checkout is not None:
            stage = checkout.resolve() / "benchmarks" / "contenders" / "stage.py"
            environment["PYTHONPATH"] = str(checkout.resolve())
        self._process = subprocess.Popen(
            [python, str(stage), key, json.dumps(asdict(work))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        self.name = key

    def wait(self) -> None:
        """Wait until it is ready, and learn its name.

        Raises:
            LeftOutError: what it needs is not installed.
            RuntimeError: it failed.
        """
        self.name = self._answer()["name"]
        self._pause()

    def rounds(self, number: int) -> dict[str, float]:
        """Have rounds done; return `wall` and `processor` seconds, and `megabytes`."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no input")
        self._resume()
        time.sleep(_SETTLE)
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._pause()
        return answer

    def close(self) -> None:
        """End the process."""
        self._resume()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pause(self) -> None:
        from contenders.processes import pause

        pause(self._process.pid)

    def _resume(self) -> None:
        from contenders.processes import resume

        resume(self._process.pid)

    def _answer(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("the process has no output")
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "missing" in answer:
            self.close()
            raise LeftOutError(answer["missing"])
        if "error" in answer:
            self.close()
            raise RuntimeError(answer["error"])
        return answer


def timed_rounds(contender: Any, number: int) -> dict[str, float]:
    """Do rounds; return `wall` and `processor` seconds, and `megabytes`."""
    from contenders.processes import megabytes, processor_seconds

    before = time.perf_counter(), processor_seconds()
    for _ in range(number):
        contender.round()
    after = time.perf_counter(), processor_seconds()
    wall, processor = after[0] - before[0], after[1] - before[1]
    return {"wall": wall, "processor": processor, "megabytes": megabytes()}


def _perform(key: str, work: str) -> None:
    """Be the process: prepare, do rounds as long as numbers of them come in, and clean up."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    sys.path[0] = str(_BENCHMARKS)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        import torch

        from contenders import CONTENDERS
        from contenders.base import Work

        torch.set_num_threads(1)
        contender = CONTENDERS[key].make()
        contender.prepare(Work(**json.loads(work)))
    except ImportError as error:
        say(missing=str(error))
        return
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    say(name=contender.name)
    try:
        for line in sys.stdin:
            say(**timed_rounds(contender, int(line)))
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        contender.close()


if __name__ == "__main__":
    _perform(*sys.argv[1:])
