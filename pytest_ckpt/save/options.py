"""The options of a save that can be varied, each declared once; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple

from pytest_ckpt.errors import SettingError, unknown_name

Value = bool | int | str
Owner = Literal["writer", "planner", "serializer"]


class SaveOption(NamedTuple):
    """One option, the values it takes, and who takes it."""

    name: str
    default: Value
    owner: Owner
    meaning: str
    choices: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    """The writers of ours that know it; of planner and serializer, empty: all."""

    def parse(self, text: str, source: str) -> Value:
        """Return the value that `text` names; `SettingError` where it is none."""
        if isinstance(self.default, bool):
            if text.lower() not in _WORDS:
                raise SettingError(f"{self.name}={text} (from {source}) is neither on nor off; write one of them")
            return _WORDS[text.lower()]
        if isinstance(self.default, int):
            if not text.isdecimal() or int(text) < 1:
                raise SettingError(f"{self.name}={text} (from {source}) is no whole number above zero")
            return int(text)
        if text not in self.choices:
            raise unknown_name(f"value of {self.name}", text, self.choices, source)
        return text


_WORDS = {"on": True, "true": True, "1": True, "yes": True, "off": False, "false": False, "0": False, "no": False}
FILES, HUGGING_FACE = "FileSystemWriter", "HuggingFaceStorageWriter"

OPTIONS = (
    SaveOption("thread_count", 1, "writer", "threads of a rank that write", (), (FILES, HUGGING_FACE)),
    SaveOption("single_file_per_rank", True, "writer", "one file a rank; off: one a tensor", (), (FILES,)),
    SaveOption("sync_files", True, "writer", "fsync of each file", (), (FILES,)),
    SaveOption("per_thread_copy_ahead", 10_000_000, "writer", "bytes copied off the GPU ahead", (), (FILES,)),
    SaveOption("cache_staged_state_dict", False, "writer", "staged memory is kept from save to save", (), (FILES,)),
    SaveOption(
        "serialization_format", "torch_save", "writer", "format of the files", ("torch_save", "safetensors"), (FILES,)
    ),
    SaveOption("enable_consolidation", False, "writer", "whole tensors are put together", (), (HUGGING_FACE,)),
    SaveOption("thread_count_consolidation", 1, "writer", "threads that put them together", (), (HUGGING_FACE,)),
    SaveOption("use_direct_io", False, "writer", "writes past the page cache", (), ("torch-checkpointing",)),
    SaveOption("enable_plan_caching", False, "planner", "plans are kept from save to save"),
    SaveOption("dedup_save_to_lowest_rank", False, "planner", "replicas are written by the lowest rank"),
    SaveOption("crc32", True, "serializer", "checksums in the files that torch.save writes"),
)
OF_ENGINES = {"torch-checkpointing": ("sync_files", "use_direct_io")}
"""What the engines of ours take that have no writers."""
BY_NAME = {option.name: option for option in OPTIONS}

Chosen = tuple[tuple[str, Value], ...]
"""Options that differ from their defaults, by name, in the order of `OPTIONS`."""


def parse_matrix(given: Sequence[tuple[str, str]], writer: str, engine: str = "dcp") -> list[Chosen]:
    """Return every combination of the values in `given`, (`name=value,value`, source) pairs, for `writer`.

    An engine but `dcp` has no writers; the options are its own then.

    One empty choice where nothing is given. `SettingError` for an option that the writer does not know; those of a
    user's own writer are not known here, and are checked against its function when it is called.
    """
    axes: dict[str, list[Value]] = {}
    for text, source in given:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name or not values.strip():
            raise SettingError(f"writer option {text!r} (from {source}) sets nothing; write NAME=VALUE or NAME=V1,V2")
        parse = _parser_of(name, writer, engine, source)
        own = axes.setdefault(name, [])
        own += [value for part in values.split(",") if (value := parse(part.strip(), source)) not in own]
    return [_differing(dict(zip(axes, values, strict=True))) for values in product(*axes.values())]


def owned_by(owner: Owner, options: Mapping[str, Value]) -> dict[str, Value]:
    """Return those of `options` that `owner` takes; what no one declared is the user's own writer's."""
    return {
        name: value
        for name, value in options.items()
        if (BY_NAME[name].owner if name in BY_NAME else "writer") == owner
    }


def _parser_of(name: str, writer: str, engine: str, source: str) -> Callable[[str, str], Value]:
    option = BY_NAME.get(name)
    if engine in OF_ENGINES:
        if name not in OF_ENGINES[engine] or option is None:
            raise unknown_name(f"option of engine {engine}", name, OF_ENGINES[engine], source)
        return option.parse
    if engine != "dcp":
        return _guess
    is_ours = writer in (FILES, HUGGING_FACE)
    if option is not None and (not is_ours or not option.writers or writer in option.writers):
        return option.parse
    if is_ours:
        known = [o.name for o in OPTIONS if not o.writers or writer in o.writers]
        raise unknown_name(f"option of {writer}", name, known, source)
    return _guess


def _guess(text: str, source: str) -> Value:
    """Return a value for a function that we know nothing of: a number, on or off, or the text itself."""
    if text.isdecimal():
        return int(text)
    return _WORDS.get(text.lower(), text)


def _differing(options: dict[str, Value]) -> Chosen:
    order = {name: place for place, name in enumerate(BY_NAME)}
    kept = [(n, v) for n, v in options.items() if n not in BY_NAME or BY_NAME[n].default != v]
    return tuple(sorted(kept, key=lambda pair: order.get(pair[0], len(order))))
