"""Every documented example is run; what the docs list is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_ckpt.accept.known import KNOWN
from pytest_ckpt.model.geometry import GEOMETRIES
from pytest_ckpt.model.recipe import RECIPES, state_bytes
from pytest_ckpt.plugin import fixtures
from pytest_ckpt.plugin.options import OPTIONS
from pytest_ckpt.records import Round, SaveRecord

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLE = re.compile(r"```python\n# (test_\w+\.py)\n(.*?)```", re.DOTALL)


def examples() -> dict[str, str]:
    return {name: code for page in PAGES for name, code in EXAMPLE.findall(page.read_text())}


def test_every_python_example_is_one_that_runs() -> None:
    for page in PAGES:
        assert page.read_text().count("```python") == len(EXAMPLE.findall(page.read_text())), page


def test_documented_examples_run(pytester: pytest.Pytester) -> None:
    for name, code in examples().items():
        (pytester.path / name).write_text(code)
    result = pytester.runpytest_subprocess("--ckpt-model=llama3-tiny", "--ckpt-rounds=4", timeout=300)
    assert result.ret == 0
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] >= len(examples())


def test_every_option_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "options.md").read_text()
    assert re.findall(r"^\| `(--ckpt-[a-z-]+)", text, re.MULTILINE) == [option.flag for option in OPTIONS]


def test_every_fixture_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "fixtures.md").read_text()
    public = {name for name in vars(fixtures) if name.startswith("ckpt_")}
    assert set(re.findall(r"^\| `(ckpt_\w+)`", text, re.MULTILINE)) == public


def test_every_promise_and_every_known_behaviour_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "acceptance.md").read_text()
    suites = (ROOT / "suites" / "acceptance").glob("test_*.py")
    promises = {name for suite in suites for name in re.findall(r"^def (test_\w+)", suite.read_text(), re.MULTILINE)}
    assert set(re.findall(r"^\| `(test_\w+)`", text, re.MULTILINE)) == promises
    assert re.findall(r"^### ([a-z-]+)$", text, re.MULTILINE) == list(KNOWN)


def test_every_key_of_the_result_file_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "result-file.md").read_text()
    for field in (*SaveRecord.__struct_fields__, *Round.__struct_fields__):
        assert f"`{field}`" in text, field


def test_every_model_is_in_the_reference_with_its_figures() -> None:
    text = (DOCS / "reference" / "models.md").read_text()
    for name, geometry in GEOMETRIES.items():
        sizes = " | ".join(f"{state_bytes(geometry, recipe) / 1e9:.3f}" for recipe in RECIPES.values())
        assert f"| `{name}` | {geometry.parameter_count:,} | {geometry.tensor_count} | {sizes} |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page}: {link}"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "the tests" in (ROOT / ".ci" / "run").read_text()
    (command,) = re.findall(r"<!-- the tests -->\s*```\w*\n(.*)\n```", (ROOT / "README.md").read_text())
    assert command.startswith("python3 -m venv ")
    assert "\n" not in command
