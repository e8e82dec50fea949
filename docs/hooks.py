"""What makes pages of the docs from the code they describe: the front page, the schedules, the reference.

Used by mkdocs while it builds, and by the tests, which read the same pages. Everything is asked of the package itself.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fpipe  # noqa: E402
from fpipe.generators import about_schedule  # noqa: E402
from fpipe.generators.comparison import per_share  # noqa: E402


# ---- the front page -------------------------------------------------------------------------------------------------
def index() -> str:
    """README.md, with its links as seen from within docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^\]]*)\]\((?:examples|tests|CONTRIBUTING|CHANGELOG|LICENSE)[^)]*\)", r"\1", text)


# ---- the schedules --------------------------------------------------------------------------------------------------
class Facts(NamedTuple):
    """What is published of a schedule; the total is checked against the simulator when the page is made."""

    paper: str
    arxiv: str
    total: str  #: with p ranks, m microbatches, and F = I = W = 1 for a rank's whole share
    peak: str
    formula: Callable[[int, int], float] | None = None
    needs: str = ""


FACTS = {
    "GPipe": Facts("Huang et al. 2019", "1811.06965", "(m + p - 1)(F + B)", "m", lambda p, m: 3 * (m + p - 1)),
    "1F1B": Facts("Narayanan et al. 2021; Fan et al. 2021", "2006.09503", "(m + p - 1)(F + B)", "p - r",
                  lambda p, m: 3 * (m + p - 1)),
    "Interleaved1F1B": Facts("Narayanan et al. 2021", "2104.04473", "m(F + B) + (p - 1)(F + B)/v", "p + (p - 1)/v",
                             lambda p, m: 3 * m + 3 * (p - 1) / 2),
    "LoopedBFS": Facts("Lamy-Poirier 2023", "2211.05953", "m(F + B) + (p - 1)(F + B)/v", "m",
                       lambda p, m: 3 * m + 3 * (p - 1) / 2),
    "InterleavedZeroBubble": Facts("Qi et al. 2024", "2401.10241", "m(F + B) + (p - 1)(F + I - W)/v", "p",
                                   lambda p, m: 3 * m + (p - 1) / 2),
    "ZBVZeroBubble": Facts("Qi et al. 2024", "2401.10241", "m(F + B) + (p - 1)/2; span m(F + B)", "p",
                           lambda p, m: 3 * m + (p - 1) / 2),
    "DualPipeV": Facts("DeepSeek-AI 2024", "2412.19437", "m(F + B) + (p - 1)(F&B + B - 3W)/2, F&B = F + B", "p + 1/2",
                       lambda p, m: 3 * m + (p - 1), "m of 2p or more for its full form"),
    "Eager1F1B": Facts("Zhuang et al. 2022", "2211.05322", "(m + p - 1)(F + B)", "2(p - r) - 1",
                       lambda p, m: 3 * (m + p - 1)),
    "Overlapped1F1B": Facts("Zhuang et al. 2022, its warm-up", "2211.05322", "(m + p - 1)(F + B), F&B = F + B",
                            "2(p - r)", lambda p, m: 3 * (m + p - 1)),
    "ZBH1": Facts("Qi et al. 2024", "2401.10241", "m(F + B) + (p - 1)(F + I - W)", "p", lambda p, m: 3 * m + p - 1),
    "ZBH2": Facts("Qi et al. 2024", "2401.10241", "m(F + B) + (p - 1)F; span m(F + B)", "2p - 1",
                  lambda p, m: 3 * m + p - 1),
    "ZB1P": Facts("Qi et al. 2024, section 3", "2401.10241", "by search, at most p activations", "p"),
    "ZB2P": Facts("Qi et al. 2024, section 3", "2401.10241", "by search, at most 2p activations", "2p"),
    "VHalf": Facts("Qi et al. 2024", "2405.15362", "by search on a building block", "(p + 2) // 2"),
    "VMin": Facts("Qi et al. 2024", "2405.15362", "by search on a building block", "(p + 4) // 3"),
    "DualPipe": Facts("DeepSeek-AI 2024", "2412.19437", "m(F + B) + (p/2 - 1)(F&B + B - 3W)", "p + 1", None,
                      "p even; weights stand twice"),
    "Chimera": Facts("Li and Hoefler 2021", "2107.06925", "idle p - 2 passes at F = B", "p/2 + 1 to p", None,
                     "p even; weights stand twice"),
    "Hanayo": Facts("Liu et al. 2023", "2308.15762", "m(F + B) + (p - 1)(F + B)/2w at F = B", "p"),
}  # fmt: skip
P, M = 4, 8


def zoo() -> tuple[str, dict[str, bytes]]:
    """The page of all schedules, and its pictures by path."""
    lines = [
        "# The schedules", "",
        f"Every picture here is drawn by `fpipe draw`, for {P} ranks and {M} microbatches, where F, I and W of a",
        "rank's whole share of the model cost 1 each and B = I + W. *Total* is the makespan of all ranks; *span* the",
        "longest time from a rank's own first start to its own last end; the bubble is 1 - work/span. A peak counts",
        "one microbatch's activations of a rank's whole share. p is the number of ranks, m of microbatches, r a rank,",
        "v the stages on a rank, w the waves.", "",
        "[Which one to take](howto/choose.md) · `fpipe compare` shows all of them for your own counts and costs", "",
    ]  # fmt: skip
    pictures: dict[str, bytes] = {}
    for name in fpipe.schedule_names():
        if name not in FACTS:
            continue  # registered by a user
        made = fpipe.make_schedule(name, P, M)
        timeline = made.simulate(per_share(fpipe.Costs(), made))
        facts = FACTS[name]
        pictures[f"zoo/{name}.svg"] = svg(timeline)
        peak = " ".join(f"{value:g}" for value in timeline.peak_bytes)
        lines += [
            f"## {name}", "", about_schedule(name).replace("``", "`"), "",
            f"![{name}, {P} ranks, {M} microbatches](zoo/{name}.svg)", "",
            "| | |", "|---|---|",
            f"| paper | {facts.paper}, [arXiv:{facts.arxiv}](https://arxiv.org/abs/{facts.arxiv}) |",
            f"| total | {facts.total} |",
            f"| in the picture | total {timeline.total:g}, span {timeline.span:g}, bubble {timeline.bubble:.1%} |",
            f"| activations held | {facts.peak}; in the picture, by rank: {peak} |",
            *([f"| needs | {facts.needs} |"] if facts.needs else []), "",
            "```text", inspect.cleandoc(_module_of(name).__doc__ or ""), "```", "",
        ]  # fmt: skip
    return "\n".join(lines), pictures


def _module_of(name: str) -> Any:
    made = import_module("fpipe.generators")
    return sys.modules[next(entry.make for entry in made._TABLE if entry.name == name).__module__]


def svg(timeline: fpipe.Timeline) -> bytes:
    """The drawing of a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "picture.svg")
        timeline.save(path)
        return path.read_bytes()


# ---- the reference --------------------------------------------------------------------------------------------------
def reference() -> str:
    """Every public name with its signature and docstring; a name without one stops the build."""
    lines = ["# Reference", "", "Made from the docstrings; the suite runs the examples in them.", ""]
    for module, names in fpipe._TABLE.items():
        lines += [f"## {TITLES.get(module, module.strip('_').replace('.', ' ').capitalize())}", ""]
        for name in names.split():
            lines += entry(f"fpipe.{name}", getattr(fpipe, name))
    for module in fpipe._MODULES:
        if module == "errors":
            continue  # its names stand above
        found = getattr(fpipe, module)
        lines += [f"## fpipe.{module}", "", text_of(found, f"fpipe.{module}"), ""]
        for name in getattr(found, "__all__", ()):
            if inspect.isclass(getattr(found, name)) or inspect.isfunction(getattr(found, name)):
                lines += entry(f"fpipe.{module}.{name}", getattr(found, name))
    return "\n".join(lines)


TITLES = {
    "_pipeline": "Pipelines and their gradients", "_launch": "Processes on this machine", "actions": "Actions",
    "collectives.local": "Ranks in this process", "collectives.setup": "Ranks under torchrun",
    "generators": "Schedules by name", "interop.modules": "Modules", "tracing": "What a stage becomes",
    "transforms": "Gradient transforms", "simulate": "Costs", "profiling": "Measuring",
}  # fmt: skip


def entry(name: str, value: Any) -> list[str]:
    """One name."""
    lines = [f"### {name}", ""]
    if inspect.isclass(value) or callable(value):
        told = textwrap.wrap(name + signature(value), 96, subsequent_indent="    ", break_long_words=False)
        lines += ["```text", *told, "```", ""]
    lines += [text_of(value, name), ""]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for member, doc in members(value):
            lines += [f"`.{member}`", ":   " + doc.replace("\n", "\n    "), ""]
    return lines


def signature(value: Any) -> str:
    """As it is written, without modules."""
    try:
        told = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    told = re.sub(r"<(?:function|class|object)[^>]*>", "...", told)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", told).replace("''", '""').replace("'", "")


def members(value: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties of a class, each with the first paragraph of its docstring."""
    for name, member in vars(value).items():
        if name.startswith("_") or not (callable(member) or isinstance(member, (property, classmethod, staticmethod))):
            continue
        doc = inspect.getdoc(getattr(value, name)) or ""
        if doc:
            yield name, markdown(doc.split("\n\n")[0])


def text_of(value: Any, name: str) -> str:
    """A docstring as markdown."""
    doc = inspect.getdoc(value)
    if not doc:
        raise ValueError(f"{name} is public and has no docstring")
    return markdown(doc)


def markdown(doc: str) -> str:
    """Doctests fenced, double backquotes single, lines that begin with :: or .. made plain."""
    out: list[str] = []
    fenced = open_before = False
    for line in doc.splitlines():
        if "```" in line:
            open_before = not open_before
        if not fenced and not open_before and line.lstrip().startswith(">>>"):
            out += ["", "```pycon"]
            fenced = True
        elif fenced and not line.strip():
            out.append("```")
            fenced = False
        if line.startswith(".. code-block"):
            continue
        if not fenced and not open_before:
            line = re.sub(r":(?:func|class|meth|mod):`([^`]*)`", r"`\1`", line.replace("``", "`")).replace("::", ":")
        out.append(line)
    return "\n".join([*out, *(["```"] if fenced else [])])


# ---- mkdocs ---------------------------------------------------------------------------------------------------------
def on_config(config: Any) -> Any:
    """Pages of the list that are not there yet are left out, and pages that are not in the list come last."""
    made = {"index.md", "zoo.md", "reference.md"}
    there = made | {p.relative_to(config.docs_dir).as_posix() for p in Path(config.docs_dir).rglob("*.md")}
    named: set[str] = set()

    def kept(items: list[Any]) -> list[Any]:
        out = []
        for item in items:
            ((title, value),) = item.items()
            if isinstance(value, list):
                out.append({title: kept(value)})
            elif value in there:
                named.add(value)
                out.append(item)
        return out

    config.nav = kept(config.nav)
    config.nav += [{Path(name).stem.replace("_", " ").capitalize(): name} for name in sorted(there - named)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    page, pictures = zoo()
    made = {"index.md": index(), "zoo.md": page, "reference.md": reference(), **pictures}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Stop the build where a page would load something from elsewhere: it is read without a network."""
    found = re.search(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>", output)
    if found:
        raise ValueError(f"{page.file.src_path} loads {found[0]}; keep a copy of it in docs/")
    return output
