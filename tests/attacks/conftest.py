"""What several attacks share: programs, and processes that begin at once."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def beside() -> Callable[[str], ModuleType]:
    """Import a file of this folder by its name; the tests are no package."""

    def load(name: str) -> ModuleType:
        spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)  # dataclasses look it up
        spec.loader.exec_module(module)
        return module

    return load


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
