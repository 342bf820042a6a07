"""What a checkpoint lists: in `.metadata`, in each rank's own, or in the headers of safetensors files."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from pytest_ckpt.accept import safetensors_file
from pytest_ckpt.accept.checkpoint_folder import CheckpointFolder, LeadsOut, NotThere
from pytest_ckpt.accept.metadata_file import (
    Chunk,
    Listing,
    OtherFormat,
    Place,
    RefusedMetadata,
    Tensor,
    UnreadableMetadata,
    read_metadata,
)
from pytest_ckpt.accept.safetensors_file import DamagedHeader, Shard, misplaced
from pytest_ckpt.records import Problem
from pytest_ckpt.save.readers import METADATA

INDEX = "model.safetensors.index.json"
DATA_SUFFIXES = (".distcp", safetensors_file.SUFFIX)
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_SHARD = re.compile(r"shard-(\d{1,9})-model-\d+-of-\d+\.safetensors")
_PART = re.compile(r"model-(\d{1,9})-of-(\d{1,9})\.safetensors")
_MOST_BYTES = 2**33
"""Of a file that lists; one of 16,384 ranks is some hundred MB."""


class Entry(NamedTuple):
    """A chunk of a tensor or an object, and the bytes that it lies in."""

    fqn: str
    offsets: tuple[int, ...] | None
    path: str
    start: int
    length: int
    tensor_bytes: int | None
    """Of its elements, from shape and dtype; None where they do not tell, and for an object."""
    form: str
    """`archive` of torch.save, `raw` bytes of elements, or `transformed` by the writer's extensions."""

    @property
    def name(self) -> str:
        """The name of the tensor or object, with the offsets of the chunk where it has some."""
        return self.fqn + (str(list(self.offsets)) if self.offsets else "")


class Listed(NamedTuple):
    """What is listed, by which files, and what is wrong with the lists."""

    tensors: dict[str, Tensor]
    entries: list[Entry]
    referring: dict[str, set[str]]
    """By each file that lists: the data files that it refers to."""
    problems: list[Problem]
    warnings: list[Problem]


def pickled_lists(folder: CheckpointFolder) -> list[str]:
    """Return the names of the pickles that list the checkpoint: `.metadata`, else one for each rank."""
    if METADATA in folder.files or METADATA in folder.others:
        return [METADATA]
    ranks = sorted((int(match[1]), name) for name in folder.files if (match := _OF_RANK.fullmatch(name)))
    return [name for _, name in ranks]


def list_pickled(folder: CheckpointFolder, names: list[str]) -> Listed:
    """Return what the files `names` list together.

    Raises `UnreadableMetadata`, `RefusedMetadata` or `OtherFormat`, with the name of the file in front.
    """
    found = Listed({}, [], {}, [], [])
    objects: set[str] = set()
    places: list[Place] = []
    for name in names:
        listing = _read(folder, name)
        for fqn, tensor in listing.tensors.items():
            known = found.tensors.setdefault(fqn, tensor)
            if known is not tensor:
                if (known.size, known.dtype) != (tensor.size, tensor.dtype):
                    raise UnreadableMetadata(f"{name} describes {fqn} otherwise than {names[0]} does")
                known.chunks.extend(tensor.chunks)
        objects |= listing.objects
        places += listing.places
        found.referring[name] = {place.path for place in listing.places}
    _check_places(found, objects, places)
    _make_entries(folder, found, places)
    ranks = [int(match[1]) for name in names if (match := _OF_RANK.fullmatch(name))]
    _check_numbers(found, ranks, range(max(ranks, default=0)), "__{}.metadata")
    return found


def _read(folder: CheckpointFolder, name: str) -> Listing:
    try:
        with folder.open(name) as descriptor:
            if (size := os.fstat(descriptor).st_size) > _MOST_BYTES:
                raise UnreadableMetadata(f"has {size} bytes, more than is read")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return read_metadata(file.read(size))
    except (UnreadableMetadata, RefusedMetadata, OtherFormat) as error:
        raise type(error)(f"{name} {error}") from None
    except (LeadsOut, NotThere) as error:
        raise UnreadableMetadata(f"{name} {error}") from None
    except OSError as error:
        raise UnreadableMetadata(f"{name} cannot be read: {error.strerror}") from None


def _check_places(found: Listed, objects: set[str], places: Iterable[Place]) -> None:
    placed = {(place.fqn, place.offsets) for place in places}
    for fqn, tensor in found.tensors.items():
        for chunk in tensor.chunks:
            if (fqn, chunk.offsets) not in placed:
                where = f"{fqn}{list(chunk.offsets)}" if chunk.offsets else fqn
                found.problems.append(problem("hole", "", where, "is listed, and has no place in any file"))
    for fqn in sorted(objects):
        if (fqn, None) not in placed:
            found.problems.append(problem("hole", "", fqn, "is listed, and has no place in any file"))


def _make_entries(folder: CheckpointFolder, found: Listed, places: Iterable[Place]) -> None:
    sizes = {(fqn, chunk.offsets): chunk.sizes for fqn, tensor in found.tensors.items() for chunk in tensor.chunks}
    by_path: dict[str, list[Entry]] = defaultdict(list)
    for place in places:
        known = sizes.get((place.fqn, place.offsets)) if place.offsets is not None else None
        content = found.tensors[place.fqn].bytes_of(known) if known is not None else None
        # What torch.save writes is always longer than the elements.
        form = "transformed" if place.transforms else "raw" if content == place.length else "archive"
        by_path[place.path].append(
            Entry(place.fqn, place.offsets, place.path, place.start, place.length, content, form)
        )
    for path, entries in by_path.items():
        raw = [entry for entry in entries if entry.form == "raw"]
        header = _header_behind(folder, found, path, raw)
        if header is None:
            found.entries.extend(entries)
            continue
        found.entries.extend(entry for entry in entries if entry.form != "raw")
        for entry in raw:
            _place_by_header(found, entry, header, sizes[entry.fqn, entry.offsets or ()])


def _header_behind(folder: CheckpointFolder, found: Listed, path: str, raw: list[Entry]) -> dict[str, Shard] | None:
    """Return the header of the safetensors file that DCP put behind the objects in `path`; None where it put none.

    DCP then gives every tensor the same offset, that of the header, and the length of its elements.
    """
    if not raw or len({entry.start for entry in raw}) > 1:
        return None
    start = raw[0].start
    try:
        with folder.open(path) as descriptor:
            size = os.fstat(descriptor).st_size
            head = os.pread(descriptor, 9, start)
            # A header whose first sign is damaged still has the length that fits.
            fits = start + 8 + int.from_bytes(head[:8], "little") + raw[0].length == size
            if len(raw) == 1 and head[8:] != b"{" and not fits:
                return None
            return _shards_of(found, path, descriptor, start, size)
    except DamagedHeader as error:
        found.problems.append(problem("corrupt-header", path, "", str(error)))
    except (OSError, LeadsOut, NotThere):
        return None  # found again, and named, where the file's ranges are checked
    return None


def _shards_of(found: Listed, path: str, descriptor: int, start: int, size: int) -> dict[str, Shard]:
    """Return the tensors of the safetensors that lie from `start` to the end, at `size`; `DamagedHeader`."""
    header = safetensors_file.read_header(lambda at, count: os.pread(descriptor, count, at), start, size)
    found.problems.extend(problem(flaw.kind, path, flaw.name, flaw.text) for flaw in misplaced(header, size))
    return header.shards


def _place_by_header(found: Listed, entry: Entry, header: dict[str, Shard], sizes: tuple[int, ...]) -> None:
    shard = header.get(entry.fqn)
    if shard is None:
        found.problems.append(problem("hole", entry.path, entry.name, "is not in the file's header"))
    elif shard.offsets != entry.offsets:
        text = f"was overwritten by the chunk at {list(shard.offsets)}: DCP keeps one of a tensor in such a file"
        found.problems.append(problem("hole", entry.path, entry.name, text))
    elif shard.sizes != sizes or shard.dtype != found.tensors[entry.fqn].dtype:
        text = (
            f"is {shard.dtype} {list(shard.sizes)} in the file, {found.tensors[entry.fqn].dtype} {list(sizes)} listed"
        )
        found.problems.append(problem("size-differs", entry.path, entry.name, text))
    else:
        found.entries.append(entry._replace(start=shard.start, length=shard.length))


def list_safetensors(folder: CheckpointFolder) -> Listed | None:
    """Return what the safetensors files in `folder` itself list, with the index beside them; None where none are."""
    names = sorted(
        name
        for name in (*folder.files, *folder.others)
        if name.endswith(safetensors_file.SUFFIX) and os.sep not in name
    )
    if not names and INDEX not in folder.files:
        return None
    found = Listed({}, [], {}, [], [])
    held: dict[str, set[str]] = {}
    for name in names:
        header = _header_of(folder, found, name)
        held[name] = set(header)
        for fqn, shard in header.items():
            _add_shard(found, name, fqn, shard)
    if INDEX in folder.files:
        _check_index(folder, found, held)
    parts = [(int(match[1]), int(match[2])) for name in names if (match := _PART.fullmatch(name))]
    for count in sorted({count for _, count in parts}):
        have = {number for number, of in parts if of == count}
        absent = (number for number in range(1, count + 1) if number not in have)
        for number in islice(absent, 1000):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            found.problems.append(problem("missing-file", name, "", "is not there, as the other names say"))
    shards = [int(match[1]) for name in names if (match := _SHARD.fullmatch(name))]
    _check_numbers(found, shards, range(1, max(shards, default=1)), "shard-{:05}-...")
    return found


def _header_of(folder: CheckpointFolder, found: Listed, name: str) -> dict[str, Shard]:
    try:
        with folder.open(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size == 0:
                found.problems.append(problem("empty-file", name, "", "has 0 bytes"))
                return {}
            return _shards_of(found, name, descriptor, 0, size)
    except DamagedHeader as error:
        found.problems.append(problem("corrupt-header", name, "", str(error)))
    except LeadsOut as error:
        found.problems.append(problem("outside", name, "", str(error)))
    except (OSError, NotThere) as error:
        found.problems.append(problem("unreadable", name, "", f"cannot be read: {error}"))
    return {}


def _add_shard(found: Listed, name: str, fqn: str, shard: Shard) -> None:
    end = tuple(offset + size for offset, size in zip(shard.offsets, shard.sizes, strict=True))
    known = found.tensors.get(fqn)
    if known is None:
        known = Tensor(end, shard.dtype, True, [])
    elif len(known.size) != len(end) or known.dtype != shard.dtype:
        text = f"is {shard.dtype} of {len(end)} dimensions, and {known.dtype} of {len(known.size)} in another file"
        found.problems.append(problem("size-differs", name, fqn, text))
        return
    hull = tuple(map(max, known.size, end)) if end else ()
    known.chunks.append(Chunk(shard.offsets, shard.sizes))
    found.tensors[fqn] = known._replace(size=hull)
    found.entries.append(Entry(fqn, shard.offsets, name, shard.start, shard.length, shard.length, "raw"))


def _check_index(folder: CheckpointFolder, found: Listed, held: dict[str, set[str]]) -> None:
    try:
        with folder.open(INDEX) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            weight_map = json.loads(file.read(_MOST_BYTES))["weight_map"]
            listed = {str(fqn): str(name) for fqn, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableMetadata(f"{INDEX} cannot be read ({type(error).__name__})") from None
    found.referring[INDEX] = set(listed.values())
    for name in sorted(set(listed.values()) - held.keys()):
        found.problems.append(problem("missing-file", name, "", f"is not there; {INDEX} refers to it"))
    for fqn, name in listed.items():
        if name in held and fqn not in held[name]:
            found.problems.append(problem("hole", name, fqn, f"is not in the file's header; {INDEX} says so"))


def _check_numbers(found: Listed, have: list[int], wanted: range, pattern: str) -> None:
    """Note the numbers that are missing below the highest, and that nothing tells what came above it."""
    if not have:
        return
    for number in sorted(set(wanted) - set(have))[:1000]:
        text = "is not there, and one with a higher number is"
        found.problems.append(problem("missing-file", pattern.format(number), "", text))
    text = "has the highest number; the folder does not tell whether one more was written"
    found.warnings.append(problem("unknown-end", pattern.format(max(have)), "", text))


def problem(kind: str, file: str, entry: str, text: str) -> Problem:
    """Return a problem; `text` goes on after the names of entry and file."""
    return Problem(kind=kind, file=file, entry=entry, text=text)
