"""Runs of a study: the variants of a comparison file at a study's size, and their models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file

import fedsim
from experiments.reproductions.study import Setup, StudyError
from fedsim.comparison.outcomes import RunOutcome

FILES = Path(__file__).parent / "files"


@dataclass(frozen=True, kw_only=True)
class VariantRuns:
    """The runs of a variant, one for each seed, in the order of the seeds.

    Attributes:
        outcomes: of the runs.
        paths: their directories.
    """

    outcomes: tuple[RunOutcome, ...]
    paths: tuple[Path, ...]

    def metric(self, name: str) -> list[float]:
        """Return a final metric of each run; a run without it has NaN."""
        found = (one.metrics.get(name) for one in self.outcomes)
        return [float("nan") if value is None else value for value in found]

    def models(self) -> NDArray[np.float64]:
        """Return the final models, (runs, values)."""
        stored = (load_file(path / "model.safetensors") for path in self.paths)
        flat = [np.concatenate([model[name].ravel() for name in sorted(model)]) for model in stored]
        return np.array(flat, dtype=np.float64)

    def seconds(self) -> list[float]:
        """Return the wall-clock seconds of the rounds of each run."""
        return [one.seconds for one in self.outcomes]


def run_variants(
    file: str,
    setup: Setup,
    *,
    changes: Mapping[str, Any] | None = None,
    variants: Sequence[str] | None = None,
) -> dict[str, VariantRuns]:
    """Run the variants of a comparison file with the seeds of a setup.

    Args:
        file: comparison file in `files/`.
        setup: seeds and directories.
        changes: settings of all variants by dotted key, such as a smaller number of rounds. Those
            of `privacy` pass by a variant without privacy.
        variants: names of the variants that run; None: all.

    Raises:
        StudyError: a run failed.
    """
    source = comparison_of(file, setup.seeds, changes=changes or {}, variants=variants)
    out = setup.out / Path(file).stem
    result = fedsim.compare(source, out=out, workers=setup.workers)
    if result.interrupted:
        raise KeyboardInterrupt
    found = {}
    for name in source["variants"]:
        outcomes = [one for one in result.results.outcomes if one.variant == name]
        for one in outcomes:
            if not one.is_finished:
                raise StudyError(f"{out / one.path}: the run failed: {one.reason}; see its files")
        paths = tuple(out / one.path for one in outcomes)
        found[name] = VariantRuns(outcomes=tuple(outcomes), paths=paths)
    return found


def comparison_of(
    file: str,
    seeds: Sequence[int],
    *,
    changes: Mapping[str, Any],
    variants: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the content of a comparison file with other seeds and settings.

    Args:
        file: as of `run_variants`.
        seeds: in place of the file's.
        changes: as of `run_variants`.
        variants: as of `run_variants`.
    """
    content = yaml.safe_load((FILES / file).read_text())
    chosen = {name: content["variants"][name] or {} for name in variants or content["variants"]}
    return {
        **content,
        "name": Path(file).stem,
        "base": str(FILES / content["base"]),
        "seeds": list(seeds),
        "baseline": content["baseline"] if content["baseline"] in chosen else next(iter(chosen)),
        "variants": {name: _merged(own, changes) for name, own in chosen.items()},
    }


def _merged(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a variant by dotted key, and then the changes of all variants."""
    merged = _dotted(own)
    has_privacy = merged.get("privacy", True) is not None
    kept = {key: one for key, one in changes.items() if has_privacy or key[:8] != "privacy."}
    return {**merged, **kept}


def _dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted key; a value under a key with a dot stays as it is."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and "." not in key:
            found |= {f"{key}.{inner}": one for inner, one in _dotted(value).items()}
        else:
            found[key] = value
    return found
