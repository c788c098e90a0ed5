"""``accum-plugin configure``: write the flag into an accelerate config file and leave the rest of it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from accum_plugin.flag import KEY, check

# accelerate refuses a file without the second; `accelerate config` always writes both.
ACCELERATE_KEYS = ("compute_environment", "distributed_type")


def configure(value: Any, config_file: str | Path | None = None) -> Path:
    """Write the ``accum_plugin`` key into an accelerate config file; take it out where ``value`` is off.

    Comments, order and every other key of a YAML file stay; a JSON file keeps its order and gets two-space indents.

    Args:
        value: A mode (``"fix"``), a mapping of keywords (``{"mode": "fix", "verify": True}``), or ``"off"``.
        config_file: The file; ``None`` takes the one that ``accelerate launch`` reads by default.

    Returns:
        The file written.

    Raises:
        ValueError: If the value is not understood, or the file is not an accelerate config that can be edited; nothing
            is written then.
    """
    if check(value) is None:
        value = None
    path = default_config_file() if config_file is None else Path(config_file).expanduser()
    text = _read(path)
    edited = _edit_json(path, text, value) if _is_json(path, text) else _edit_yaml(path, text, value)
    try:
        path.write_bytes(edited.encode())
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    return path


def default_config_file() -> Path:
    """Return the config file that ``accelerate launch`` reads without ``--config_file``."""
    from accelerate.commands.config.config_args import default_config_file as default

    return Path(default)


def _read(path: Path) -> str:
    """Return the file's text, line ends as they are."""
    if not path.is_file():
        raise ValueError(
            f"there is no accelerate config file at {path}; run `accelerate config` (or `accelerate config default`) "
            "to write one, or name yours with --config-file"
        )
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _not_a_config(path, "is not a text file") from error


def _not_a_config(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} {why}, so it is not an accelerate config file and was left as it is; run "
        f"`accelerate config --config_file {path.with_name('accelerate.yaml')}` to write one"
    )


def _is_json(path: Path, text: str) -> bool:
    """Whether to treat the file as JSON: `accelerate config default` writes JSON into a file named ``.yaml``."""
    if path.suffix == ".json":
        return True
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _checked(path: Path, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _not_a_config(path, "holds no mapping of keys")
    if not any(key in data for key in ACCELERATE_KEYS):
        raise _not_a_config(path, f"has none of the keys {' and '.join(ACCELERATE_KEYS)}")
    return data


def _with_value(data: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return the config as it is to read afterwards."""
    if value is None:
        return {key: item for key, item in data.items() if key != KEY}
    return {**data, KEY: value}


def _edit_json(path: Path, text: str, value: Any) -> str:
    try:
        data = _checked(path, json.loads(text))
    except json.JSONDecodeError as error:
        raise _not_a_config(path, f"is not JSON ({error})") from error
    return json.dumps(_with_value(data, value), indent=2, ensure_ascii=False) + "\n"


def _edit_yaml(path: Path, text: str, value: Any) -> str:
    """Change one entry of the text, and prove by reading it again that nothing else changed."""
    try:
        data = _checked(path, yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise _not_a_config(path, f"is not YAML ({' '.join(str(error).split())})") from error
    edited = _replace_entry(text, value)
    if not _reads_as(edited, _with_value(data, value)):
        raise ValueError(f"{path} is laid out in a way that cannot be edited safely; set {KEY} in it by hand")
    return edited


def _reads_as(text: str, data: dict[str, Any]) -> bool:
    try:
        return yaml.safe_load(text) == data
    except yaml.YAMLError:
        return False


def _replace_entry(text: str, value: Any) -> str:
    """Put the entry where it is now, or at the end; a ``value`` of ``None`` takes it out."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    newline = "\r\n" if "\r\n" in text else "\n"
    spans = [(key, item) for key, item in root.value if key.value == KEY]
    entry = _entry(value)
    if spans:
        key, item = spans[-1]
        start, end = key.start_mark.index, _end_of(item)
        return text[:start] + entry + text[end:] if entry else _without_line(text, start, end)
    if not entry:
        return text
    if root.flow_style:
        start = root.start_mark.index + 1
        return f"{text[:start]}{entry}, {text[start:]}"
    separator = "" if text.endswith("\n") else newline
    return f"{text}{separator}{' ' * root.start_mark.column}{entry}{newline}"


def _entry(value: Any) -> str:
    """Write ``accum_plugin: value`` on one line, mappings in braces."""
    if value is None:
        return ""
    line = yaml.safe_dump({KEY: value}, default_flow_style=True, sort_keys=False, width=float("inf"))
    return line.strip()[1:-1]


def _end_of(node: yaml.Node) -> int:
    """Return where a node's own text ends; the end mark of a block runs on over the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end_of(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.index


def _without_line(text: str, start: int, end: int) -> str:
    """Cut a block entry out of the text, from the start of its first line to the end of its last."""
    line_end = text.find("\n", end)
    return text[: text.rfind("\n", 0, start) + 1] + (text[line_end + 1 :] if line_end >= 0 else "")
