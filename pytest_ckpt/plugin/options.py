"""The options, each declared once: command line, ini twin and help come from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest


@dataclass(frozen=True)
class Option:
    """One setting: `--ckpt-NAME` on the command line, `ckpt_NAME` in an ini file; the command line replaces the ini."""

    name: str
    metavar: str
    help: str
    repeatable: bool = False
    switch: bool = False
    """Takes no value on the command line; `on` or `off` in an ini file."""

    @property
    def flag(self) -> str:
        """The command line option."""
        return "--ckpt-" + self.name

    @property
    def key(self) -> str:
        """The ini key, and the destination on the command line."""
        return "ckpt_" + self.name.replace("-", "_")


OPTIONS = (
    Option("target", "[LABEL=]PATH", "folder to save into; default: one below pytest's temporary root", True),
    Option("model", "NAME", "model to save, or package.module:function; default: auto", True),
    Option("state", "RECIPE", "fp32-adamw (default), mixed-adamw or weights-bf16"),
    Option("ranks", "N", "ranks of the process group; default: 2 on CPU, all visible GPUs with CUDA", True),
    Option("mesh", "MESH", "mesh of the ranks, as shard=8 or replicate=2,shard=4; default: full shard"),
    Option("share", "K/N", "K ranks write what the first K of N would, and nobody the rest; default: none"),
    Option("plan-ranks", "N", "ranks on paper that planning is measured with; default: 8, 32, 128, 512", True),
    Option("device", "cpu|cuda", "where the state lives; default: cuda where there is one"),
    Option("mode", "MODE", "sync, async, async-staged, async-process, async-pinned; default: sync and async", True),
    Option("engine", "ENGINE", "dcp (default), torch-checkpointing, or package.module:factory"),
    Option(
        "writer",
        "package.module:factory",
        "FileSystemWriter (default), HuggingFaceStorageWriter, or a function from a path to a StorageWriter",
    ),
    Option(
        "reader",
        "package.module:factory",
        "what loads read with, a function from a path to a StorageReader; default: the writer's own, else by the path",
    ),
    Option("writer-opt", "NAME=V1,V2", "option of the writer; several values make a matrix; default: none", True),
    Option("preset", "NAME", "the modes and the state of a known trainer: torchtitan; default: none"),
    Option("train", "BATCHxSEQ|on|off", "train beside the saves, so many tokens a rank and step; default: off"),
    Option("overlap", "", "begin each async save while an earlier one is under way; default: off", switch=True),
    Option("rounds", "N", "saves per scenario after one warm-up; default: 5"),
    Option("max-time", "TIME", "time for one scenario, warm-up included, as 90s, 15m, 2h; default: 15m"),
    Option("session-time", "TIME", "time for all scenarios together; default: none"),
    Option("timeout", "TIME", "deadline for one command of the ranks, a save included; default: 30m"),
    Option("keep", "none|failed|all", "checkpoints to keep afterwards; default: none"),
    Option("probe", "SIZE|off", "most bytes that a probe of the storage writes; default: 2GiB"),
    Option("survey", "", "probe the other writable volumes of the machine too; default: off", switch=True),
    Option("trace", "FILE", "write all ranks' spans for ui.perfetto.dev; default: none"),
    Option("baseline", "check|grow|save|require|off", "what to do with stored baselines; default: check"),
    Option("baseline-dir", "DIR", "where baselines are kept; default: baselines, beside the ini file"),
    Option("baseline-force", "", "save a regressed session as baseline all the same; default: off", switch=True),
    Option("tolerance", "SHARE", "loss of throughput that is tolerated, as 0.1; default: a tenth"),
    Option(
        "fail-on",
        "OUTCOME,...",
        "what fails a test too: undecided verdicts, known-dcp behaviour; default: nothing more",
    ),
    Option("grace", "TIME", "what a scheduler leaves between SIGTERM and SIGKILL; default: 30s"),
    Option("examples", "N", "state dicts that acceptance makes up for each scenario; default: 20"),
    Option("hardware", "[LABEL=]ID", "hardware id to use instead of the one found", True),
    Option("expect-hardware", "[LABEL=]ID", "fail at once where the hardware id is another", True),
)


def add_options(parser: pytest.Parser) -> None:
    """Declare all of `OPTIONS` to pytest."""
    group = parser.getgroup("ckpt", "distributed checkpoint saves (pytest-ckpt)")
    for option in OPTIONS:
        group.addoption(option.flag, dest=option.key, default=None, help=option.help, **_argument(option))
        parser.addini(
            option.key,
            option.help,
            type=_ini_type(option),
            default=[] if option.repeatable else "",
        )


def given_values(config: pytest.Config, name: str) -> list[tuple[str, str]]:
    """Return what the user wrote for option `name` as (text, source) pairs; nothing where it was left out."""
    option = next(o for o in OPTIONS if o.name == name)
    given = config.getoption(option.key)
    if given is not None:
        return [(text, option.flag) for text in (given if option.repeatable else [given])]
    written = config.getini(option.key)
    source = _ini_source(config, option)
    return [(text, source) for text in (written if option.repeatable else [written]) if text]


def any_given(config: pytest.Config) -> bool:
    """Return whether the user set any of the options, so that bad values are refused before collection."""
    return any(given_values(config, option.name) for option in OPTIONS)


def _ini_source(config: pytest.Config, option: Option) -> str:
    overrides = config.getoption("override_ini", None) or []
    if config.inipath is None or any(o.partition("=")[0].strip() == option.key for o in overrides):
        return f"-o {option.key}"
    return f"ini option {option.key} in {config.inipath.name}"


def _argument(option: Option) -> dict[str, Any]:
    if option.switch:
        return {"action": "store_const", "const": "on"}
    return {"action": "append" if option.repeatable else "store", "metavar": option.metavar}


def _ini_type(option: Option) -> Literal["linelist", "string"]:
    return "linelist" if option.repeatable else "string"
