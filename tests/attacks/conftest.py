"""What several attacks share: programs, and processes that begin at once."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def beside(module_at: Callable[[Path], ModuleType]) -> Callable[[str], ModuleType]:
    """Import a file of this folder by its name."""
    return lambda name: module_at(Path(__file__).with_name(f"{name}.py"))


@pytest.fixture(scope="session")
def at_once() -> Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]:
    """Call a function for each argument in a forked process, all at once; return the answers."""

    def call(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        (start, go), (answers, write) = os.pipe(), os.pipe()
        children: list[int] = []
        for argument in arguments:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.close(go)
                    os.read(start, 1)  # all wait for the end of one pipe
                    os.write(write, json.dumps(function(argument)).encode() + b"\n")
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        for descriptor in (go, write, start):
            os.close(descriptor)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(arguments)
        with open(answers) as stream:
            return [json.loads(line) for line in stream]

    return call
