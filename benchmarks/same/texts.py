"""Results of an experiment as lines of text, without what differs from run to run."""

import hashlib
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "files": {
        "checkpoint/inputs.json": "digests under a key of the machine",
        "environment.json": "versions, platform and commit",
        "experiment.yaml": "names of settings may change",
        "manifest.json": "digests of the other files, with their times",
    },
    "keys": {
        **dict.fromkeys(("seconds", "timeline", "setup"), "times"),
        **dict.fromkeys(("version", "fedsim"), "the version of fedsim"),
        **dict.fromkeys(("digest", "rounds_digest", "releases_digest"), "of a file with the above"),
    },
    "fields": {
        **dict.fromkeys(("run_id", "round_nonce"), "drawn for each run or round"),
        **dict.fromkeys(("public_key", "helper_keys", "tag", "envelopes"), "made of fresh keys"),
        **dict.fromkeys(("sealing_key", "sealing_keys"), "fresh keys"),
        **dict.fromkeys(("masking_key", "masking_keys"), "fresh keys"),
        **dict.fromkeys(("seed_shares", "key_shares", "commitment"), "of fresh secrets"),
        **dict.fromkeys(("share", "total", "masked"), "masked by fresh secrets"),
        **dict.fromkeys(("clients", "points", "receivers", "senders", "active"), "a fresh graph"),
    },
    "texts": {
        r"(, )?\d[\d.,]* (ms|s|min|h)\b( left)?": "times",
        r"^[a-z ]+ \.\.\.$": "a phase that takes long",
        r"fedsim \d+\.\d+\.\d+\S*": "the version of fedsim",
        r"root: [0-9a-f]{64}": "a digest of the manifest",
        r"(^|(?<=the digest of all heads is ))[0-9a-f]{64}": "of the ledger: in SETTINGS_PART",
    },
    "pages": {
        r'(?s)<section id="settings".*?</section>': "experiment.yaml and environment.json",
        r"(?s)<figure>(?:(?!</figure>).)*? over seconds(?:(?!</figure>).)*</figure>": "times",
        r"<tr>.*<td>[\d.,]+ (ms|s|min|h)</td>.*</tr>": "times",
    },
}
"""What is not compared, and why: files of a run, keys of JSON, fields of messages (of which the
size is compared), and patterns in any text and in the source of a report.
"""
OF_SETTINGS = {
    *("request", "previous", "hash", "conditions"),  # ledger.jsonl and releases.jsonl
    *("ledger_head", "ledger_digest", "heads", "head"),
    *("params", "plan", "plan_digest"),  # of secure aggregation
}
"""Keys of digests over the text of settings and over versions: a part of their own."""
SETTINGS_PART = "digests of settings"


class Texts(dict[str, list[str]]):
    """The lines of an experiment's parts, by the name of the part."""

    def line(self, part: str, text: str) -> None:
        """Add a line to a part, unless it is empty."""
        for pattern in LEFT_OUT["texts"]:
            text = re.sub(pattern, "", text)
        if text.strip():
            self.setdefault(part, []).append(text)

    def run(self, folder: Path, *, in_order: bool = True) -> None:
        """Add the files of a run.

        Args:
            folder: of the run.
            in_order: whether one process wrote the ledger. Several write it in any order, so its
                lines are sorted by client; the chain of each client stays as it is.
        """
        for path in sorted(folder.rglob("*")):
            part = path.relative_to(folder).as_posix()
            if path.is_file() and part not in LEFT_OUT["files"]:
                for line in self._lines(part, path, in_order):
                    self.line(part, line)

    def message(self, node: str, message: Any) -> None:
        """Add a message of Flower, a line for each field."""
        place = f"{node} {message.metadata.message_type}"
        if message.has_error():
            self.line("messages", f"{place} error {message.error.code} {message.error.reason}")
            return
        for name, record in message.content.items():
            for key, value in record.items():
                own = f"{place} {name}/{key}"
                if key in OF_SETTINGS:
                    self.line(SETTINGS_PART, f"{own} = {value}")
                elif key in LEFT_OUT["fields"]:
                    self.line("messages", f"{own} of size {_size(value)}")
                else:
                    self.line("messages", f"{own} = {value_text(value)}")

    def _lines(self, part: str, path: Path, in_order: bool) -> list[str]:
        if path.suffix == ".safetensors":
            return self._tensors(part, path)
        content = path.read_text()
        match path.suffix:
            case ".json":
                return json.dumps(
                    self._kept(json.loads(content), part), indent=1, sort_keys=True
                ).splitlines()
            case ".jsonl":
                rows = [json.loads(line) for line in content.splitlines()]
                if not in_order and part == "ledger.jsonl":
                    rows.sort(key=lambda row: row["client"])
                numbered = enumerate(rows, start=1)
                return [json.dumps(self._kept(row, f"{part}:{n}")) for n, row in numbered]
            case ".html":
                return _Page(content).lines
            case _:
                return content.splitlines()

    def _tensors(self, part: str, path: Path) -> list[str]:
        from safetensors import safe_open

        with safe_open(path, "numpy") as file:
            names, metadata = sorted(file.keys()), file.metadata() or {}
            lines = [f"{name} {value_text(file.get_tensor(name))}" for name in names]
        contents = [value for _, value in sorted(metadata.items()) if value.startswith("{")]
        return lines + [json.dumps(self._kept(json.loads(one), part)) for one in contents]

    def _kept(self, value: Any, place: str) -> Any:
        """Return a value of JSON without the keys that are left out."""
        if isinstance(value, list):
            return [self._kept(one, place) for one in value]
        if not isinstance(value, dict):
            return value
        for key in sorted(OF_SETTINGS & value.keys()):
            self.line(SETTINGS_PART, f"{place} {key} = {json.dumps(value[key])}")
        gone = OF_SETTINGS | LEFT_OUT["keys"].keys()
        return {key: self._kept(one, place) for key, one in value.items() if key not in gone}


def value_text(value: Any) -> str:
    """Return a value as text, an array by its type, shape, digest and first values."""
    array = value.numpy() if hasattr(value, "numpy") else value
    if not hasattr(array, "tobytes"):
        return repr(array)
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return f"{array.dtype} {array.shape} {digest} {array.ravel()[:3].tolist()}"


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    if hasattr(value, "numpy"):
        return value.numpy().nbytes
    return len(value) if isinstance(value, bytes | str) else 1


class _Page(HTMLParser):
    """What a report says: its texts, and the labels and curves of its plots."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        for pattern in LEFT_OUT["pages"]:
            source = re.sub(pattern, "", source)
        self.feed(source.partition("</head>")[2])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the label of a plot and the points of a curve."""
        self.lines += [f"{name} {value}" for name, value in attrs if name in ("aria-label", "d")]

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        if data.strip() and self.lasttag != "script":
            self.lines.append(" ".join(data.split()))
