"""What the pages say is so: their code runs, their links, commands, flags and error messages exist."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
from jax._src import core, custom_derivatives, ffi, pjit, sharding_impls
from jax._src.export import _export, serialization
from jax._src.lax import slicing

from magi_jax.explain import parse_mask

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
)

OF_XLA = ("No FFI handler registered for",)  # see tests/ops/test_compiled_module.py


def _blocks(page, language):
    text = (ROOT / page).read_text()
    pattern = rf"^```{language}\n(.*?)^```$"
    for block in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        yield text[: block.start(1)].count("\n"), block[1]


def _pages_with(language):
    return [page for page in PAGES if any(_blocks(page, language))]


@pytest.mark.parametrize("page", _pages_with("python"))
@pytest.mark.usefixtures("all_optimizations")
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """From top to bottom, in one session per page."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    for line, code in _blocks(page, "python"):
        exec(compile("\n" * line + code, page, "exec"), namespace)


@pytest.mark.parametrize("page", _pages_with("json"))
def test_masks_in_json_are_masks(page):
    for _, text in _blocks(page, "json"):
        assert parse_mask(json.loads(text)).area


def _commands():
    for page in _pages_with("sh"):
        for _, text in _blocks(page, "sh"):
            for line in text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield page, words


@pytest.mark.parametrize(("page", "words"), list(_commands()), ids=str)
def test_commands_name_what_exists(page, words):
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)] or ["export"]
    program = next((word for word in words if word.endswith((".py", ".sbatch"))), None)
    if words[0] in ("srun", "sbatch", "python") and program:
        assert (ROOT / program).is_file()
        text = (ROOT / program).read_text() + (ROOT / "examples/language_model.py").read_text()
        for flag in (word for word in words if word.startswith("--")):
            assert f'"{flag}"' in text or program.endswith(".sbatch"), f"{program} has no {flag}"
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[:3] == ["python", "-m", "magi_jax"]:
        text = (ROOT / "magi_jax/__main__.py").read_text()
        assert all(f'"{flag}"' in text for flag in words if flag.startswith("--"))
    else:
        assert words[0] in ("pip", "export"), words


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert (folder / target).exists(), f"{page} links to {target}"


def test_navigation_has_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        name = page.removeprefix("docs/")
        listed = len(re.findall(rf"^ .*: {re.escape(name)}$", text, re.MULTILINE))
        outside = page == "README.md" or "/results/" in f"/{name}"
        assert listed == (0 if outside else 1), f"{page} is {listed} times in mkdocs.yml"


def _messages():
    """All text constants of the package and of JAX's calls, f-strings with ``...`` for their values."""

    class Texts(ast.NodeVisitor):
        def __init__(self):
            self.found = []

        def visit_JoinedStr(self, node):
            parts = (x.value if isinstance(x, ast.Constant) else "..." for x in node.values)
            self.found.append("".join(map(str, parts)))

        def visit_Constant(self, node):
            self.found.append(str(node.value))

    texts = Texts()
    of_jax = (ffi, core, custom_derivatives, _export, serialization, pjit, sharding_impls, slicing)
    jax_sources = [Path(part.__file__) for part in of_jax]
    for path in [*(ROOT / "magi_jax").rglob("*.py"), *jax_sources]:
        texts.visit(ast.parse(path.read_text()))
    return [*texts.found, *OF_XLA]


def test_error_messages_exist():
    page = (ROOT / "docs/howto/troubleshooting.md").read_text()
    messages = _messages()
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    quoted = [text for heading in headings for text in re.findall(r"`([^`]+)`", heading)]
    assert len(quoted) > 10
    for text in quoted:
        known = any(text.removesuffix("...").strip() in message for message in messages)
        assert known, f"no message has {text!r}"
