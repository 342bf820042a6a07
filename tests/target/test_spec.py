"""Targets as people write them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.errors import SettingError
from pytest_ckpt.target.spec import TargetSpec, parse_target, parse_targets

LABELS = st.text("abcXYZ019_-", min_size=1)


@pytest.mark.parametrize(
    ("text", "label", "location"),
    [
        ("ebs=/opt/work", "ebs", "/opt/work"),
        ("/mnt/nvme", "nvme", "/mnt/nvme"),
        ("/mnt/nvme/", "nvme", "/mnt/nvme/"),
        ("/", "root", "/"),
        ("/mnt/my disk (2)", "my-disk-2", "/mnt/my disk (2)"),
        ("/mnt/データ", "target", "/mnt/データ"),
        ("/data/lr=3/run", "run", "/data/lr=3/run"),
        ("./a=b", "a-b", "{cwd}/./a=b"),
        ("x=/data/lr=3", "x", "/data/lr=3"),
        ("work", "work", "{cwd}/work"),
        ("w=..", "w", "{cwd}/.."),
        ("n=~/ckpt", "n", "{home}/ckpt"),
    ],
)
def test_text_names_a_label_and_an_absolute_location(text: str, label: str, location: str) -> None:
    spec = parse_target(text, "--ckpt-target")
    expected = location.format(cwd=os.getcwd(), home=Path.home())
    assert (spec.label, spec.location, spec.source) == (label, expected, "--ckpt-target")


def test_location_as_written_is_kept_for_people() -> None:
    assert parse_target("n=~/ckpt", "ckpt_target").given == "~/ckpt"


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("", r"\[LABEL=\]PATH"),
        ("  ", r"\[LABEL=\]PATH"),
        ("=x", "write LABEL=x"),
        ("=", "write LABEL=PATH"),
        ("nv me=/x", "write nv-me=/x"),
        ("nvme=", "write nvme=PATH"),
        ("é=/x", "write LABEL=/x"),
        ("x=/a\0b", "NUL"),
        ("s3://bucket/x", "object stores by URL are not supported yet"),
        ("s3=s3://bucket/x?a=b", "object stores by URL are not supported yet"),
        ("gs://bucket/a=b", "object stores by URL are not supported yet"),
        ("~nobody-of-this-name/x", r"write \./~nobody-of-this-name/x"),
    ],
)
def test_malformed_target_is_refused_with_value_source_and_remedy(text: str, instead: str) -> None:
    with pytest.raises(SettingError, match=instead) as caught:
        parse_target(text, "ini ckpt_target")
    assert repr(text) in str(caught.value)
    assert "(from ini ckpt_target)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_targets_of_one_label_are_refused_with_both_and_a_remedy() -> None:
    with pytest.raises(SettingError, match="write LABEL=PATH, as in work-2=/b/work") as caught:
        parse_targets([("/a/work", "ini"), ("/b/work", "--ckpt-target")])
    assert "'/a/work' (from ini) and '/b/work' (from --ckpt-target)" in str(caught.value)


def test_targets_keep_their_order() -> None:
    specs = parse_targets([("b=/x", "ini"), ("a=/x", "ini")])
    assert specs == [TargetSpec("b", "/x", "/x", "ini"), TargetSpec("a", "/x", "/x", "ini")]


@given(st.text())
def test_any_text_gives_a_clean_label_or_a_setting_error(text: str) -> None:
    with contextlib.suppress(SettingError):
        spec = parse_target(text, "test")
        assert re.fullmatch(r"[A-Za-z0-9_-]+", spec.label)
        assert os.path.isabs(spec.location)
        assert "\0" not in spec.location


@given(LABELS, st.text("abc =.é", min_size=1))
def test_written_label_and_path_come_back(label: str, name: str) -> None:
    spec = parse_target(f"{label}=/mnt/{name}", "test")
    assert (spec.label, spec.location) == (label, f"/mnt/{name}")


@given(st.lists(LABELS, min_size=1, max_size=6))
def test_labels_of_accepted_targets_are_distinct(labels: list[str]) -> None:
    texts = [(f"{label}=/x", "test") for label in labels]
    if len(set(labels)) == len(labels):
        assert [spec.label for spec in parse_targets(texts)] == labels
    else:
        with pytest.raises(SettingError, match="two targets are labelled"):
            parse_targets(texts)
