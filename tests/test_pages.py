"""Every code block of the README and the docs runs as written, or says why it does not."""

import os
import re
import subprocess
import sys
from importlib import import_module
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.pages import (
    DOCS,
    LANGUAGES,
    PAGES,
    ROOT,
    commands,
    matches,
    output_of,
    read_blocks,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

BLOCKS = {page.name: read_blocks(page.read_text()) for page in PAGES}


def runnable(language, *, slow=False):
    return [
        pytest.param(name, [block.text for block in chosen], id=name)
        for name, blocks in BLOCKS.items()
        if (
            chosen := [
                b for b in blocks if b.language == language and b.is_run and b.is_slow == slow
            ]
        )
    ]


def run_python(page, blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": page}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
    return scope


@pytest.mark.parametrize(("page", "blocks"), runnable("python"))
def test_python_blocks_run(page, blocks, tmp_path, monkeypatch):
    run_python(page, blocks, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "blocks"), runnable("python", slow=True))
def test_slow_python_blocks_run(page, blocks, tmp_path, monkeypatch):
    if page != "README.md":  # test_wheel.py runs it
        run_python(page, blocks, tmp_path, monkeypatch)


@pytest.mark.slow
def test_experts_of_a_tile_agree_with_all_on_one_device(tmp_path, monkeypatch):
    """Those of the page on HSDP, whose tokens are exchanged inside tiles, around a hole."""
    code = [b.text for b in BLOCKS["hsdp.md"] if b.language == "python" and b.is_run]
    last = next(i for i, text in enumerate(code) if "def experts" in text)
    page = run_python("hsdp.md", code[: last + 1], tmp_path, monkeypatch)

    weights, batch = jax.device_get((page["weights"], page["batch"]))
    kept = tokens_kept(weights["router"], *batch[::2], page["mesh"].size, page["CAPACITY"])
    assert 0 < kept.sum() < batch[2].sum()  # some are skipped

    def loss_of(weights, x, y, mask):
        gates = jax.nn.softmax(x @ weights["router"])
        chosen = weights["experts"][gates.argmax(-1)]
        done = jnp.tanh(jnp.einsum("rtd,rtdf->rtf", x, chosen))
        out = x + done * (gates.max(-1) * kept)[..., None]
        return (((out - y) ** 2).mean(-1) * mask).sum() / mask.sum()

    loss, grads = jax.jit(jax.value_and_grad(loss_of))(weights, *batch)
    np.testing.assert_allclose(page["loss"], loss, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(page["grads"][name], grad, atol=1e-5 * np.abs(grad).max())


def tokens_kept(router, x, mask, chips, capacity):
    """The tokens for which their expert has a place: the first ones of each chip."""
    chosen = (x @ router).argmax(-1).reshape(chips, -1)
    is_real, kept = mask.reshape(chosen.shape), np.zeros(chosen.shape, bool)
    most = int(capacity * chosen.shape[1] / router.shape[1])
    for chip, number in product(range(chips), range(router.shape[1])):
        places = np.flatnonzero((chosen[chip] == number) & is_real[chip])
        kept[chip, places[:most]] = True
    return kept.reshape(mask.shape)


def emulating_pages():
    """The pages whose code emulates devices, each with all of its code that runs."""
    for name, blocks in BLOCKS.items():
        code = "\n".join(b.text for b in blocks if b.language == "python" and b.is_run)
        if "cpu_grid(" in code and name != "README.md":  # test_wheel.py runs it
            is_quick = name == "when-a-chip-dies.md"
            yield pytest.param(code, id=name, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("code", list(emulating_pages()))
def test_pages_run_in_processes_of_their_own(code, tmp_path):
    """There JAX has no devices yet, and has one alone if it is used before `cpu_grid`."""
    (tmp_path / "page.py").write_text(code)
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def check_commands(blocks):
    for block in blocks:
        for command, shown in commands(block):
            output = output_of(command)
            assert matches(shown, output), f"{command}\n{output}\n-- run scripts/shown"


@pytest.mark.parametrize(("page", "blocks"), runnable("console"))
def test_commands_print_the_output_shown(page, blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_commands(blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "blocks"), runnable("console", slow=True))
def test_slow_commands_print_the_output_shown(page, blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_commands(blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_known_language(page):
    text = page.read_text()
    blocks = BLOCKS[page.name]
    assert text.count("\n```") == 2 * len(blocks), "a fence is not closed, or is indented"
    for block in blocks:
        assert block.language in LANGUAGES, f"a block without a known language:\n{block.text}"
        assert re.fullmatch(r"|slow|not run: \S.*", block.note), block.note
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert not re.search(r"^\n {4,}\S", prose, re.M), "an indented block: fence it"


def anchors(text):
    """The headings of a page, in the form links use."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_are_not_broken(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if not target.startswith("https://"):
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


def test_names_in_the_api_reference_exist():
    names = [
        name
        for blocks in BLOCKS.values()
        for block in blocks
        for name in re.findall(
            r"^\.\. auto(?:class|function|exception)\:\: (\S+)", block.text, re.M
        )
    ]
    assert len(names) > 40
    for name in names:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name


def mentioned(text):
    """The names and modules of ftmesh that a page imports, calls or mentions."""
    imported = re.findall(r"^\s*from (ftmesh[\w.]*) import ([\w, ]+)$", text, re.M)
    names = {
        f"{module}.{name.strip()}" for module, imports in imported for name in imports.split(",")
    }
    return names | {*re.findall(r"(?:`|\b)(ftmesh(?:\.[A-Za-z_]\w*)+)(?:`|\()", text)}


def is_listed(name, listed):
    """True if the reference has the name, its class, or something in it if it is a module."""
    return any(
        name == entry or name.rpartition(".")[0] == entry or entry.startswith(f"{name}.")
        for entry in listed
    )


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)
def test_names_on_pages_are_in_the_api_reference(page):
    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: (\S+)", text, re.M)
    assert not [name for name in sorted(mentioned(page.read_text())) if not is_listed(name, listed)]


def test_unlisted_name_is_detected():
    names = mentioned(
        "from ftmesh.cost import a, b\n`ftmesh.elastic.run_log` ftmesh.Topology.grid(x)"
    )
    assert names == {
        "ftmesh.cost.a", "ftmesh.cost.b", "ftmesh.elastic.run_log", "ftmesh.Topology.grid"
    }  # fmt: skip
    listed = ["ftmesh.Topology", "ftmesh.elastic.run_log.run", "ftmesh.cost.a"]
    assert [name for name in sorted(names) if not is_listed(name, listed)] == ["ftmesh.cost.b"]


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="pip install 'ftmesh[docs]'")
    pytest.importorskip("myst_parser", reason="pip install 'ftmesh[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for page in DOCS:
        built = tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.stat().st_size > 1000


def test_wrong_output_is_detected():
    (block,) = read_blocks("x\n\n```console\n$ ftmesh --version\nftmesh 9\n```\n")
    with pytest.raises(SystemExit):
        output_of("ftmesh --version")
    assert commands(block.text) == [("ftmesh --version", "ftmesh 9\n")]
    assert matches("a ...\nd\n", "a b\nc\nd\n")
    assert not matches("a ...\nd\n", "a b\nc\nd\ne\n")
    assert not matches("a\n", "a b\n")


def test_blocks_that_are_not_run():
    text = "<!-- not run: needs a TPU -->\n```python\n1 / 0\n```\n\n```python\n1\n```\n"
    assert [block.is_run for block in read_blocks(text)] == [False, True]


def test_failing_python_is_detected(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_python("a page", ["x = 0\n", "1 / x\n"], tmp_path, monkeypatch)


def test_other_commands_are_rejected():
    with pytest.raises(AssertionError, match="only ftmesh is run here, not rm"):
        output_of("rm plan.npz")
