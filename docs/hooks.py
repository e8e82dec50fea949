"""Generates pages of the docs: the list of schedules, the published figures and the reference from
the code, others from files of the root.

mkdocs calls the hooks during a build; the tests generate and check the same pages.
"""

from __future__ import annotations

import dis
import doctest
import html
import inspect
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

sys.path.insert(0, str(ROOT / "docs"))

import explorer  # noqa: E402
import published  # noqa: E402
import types_of  # noqa: E402

import fpipe  # noqa: E402
from fpipe.generators import catalogue, orders_slices  # noqa: E402

# ---- pages of files outside of docs/ ----
#: page -> the file that it shows
COPIED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


def copied(name: str) -> str:
    """A file of the repository as a page: its links lead to pages of the site."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for page, file in COPIED.items():
        text = text.replace(f"]({file}", f"]({page}")
    text = re.sub(r"(\]\(|src=\"|srcset=\")docs/", r"\1", text)
    text = re.sub(r"\]\(examples/(\w+)\.\w+\)", r"](examples.md#\1)", text).replace(
        "](examples)", "](examples.md)"
    )
    return re.sub(r"\[([^\]]*)\]\((?:tests|LICENSE|SECURITY)[^)]*\)", r"\1", text)


#: How files of examples/cluster/ are shown, by their end.
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}


def examples() -> str:
    """The files of examples/ as a page: each under the name of its task, from its docstring."""
    lines = [
        "# Recipes and examples",
        "",
        "Each recipe is a file that runs by itself; copy it and change it. The test suite runs all "
        "of them, as far as one machine allows.",
        "",
        "| task | file |",
        "|---|---|",
    ]
    sections: list[str] = []
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix not in (".py", ".ipynb"):
            continue
        title = task(path)
        lines.append(f"| [{title}](#{path.stem}) | `{path.name}` |")
        sections += [f"## {title} {{#{path.stem}}}", "", f"`examples/{path.name}`", ""]
        for kind, text in _cells(path):
            sections += [text, ""] if kind == "markdown" else [f"```{kind}", text, "```", ""]
    lines += ["", *sections]
    for path in sorted((ROOT / "examples" / "cluster").iterdir()):
        if path.is_file():
            kind = LANGUAGES.get(path.suffix, "docker")
            text = path.read_text(encoding="utf-8").strip()
            lines += [f"## examples/cluster/{path.name} {{#{path.stem}}}", ""]
            lines += [f"```{kind}", text, "```", ""]
    return "\n".join(lines)


def task(path: Path) -> str:
    """The task of an example: the beginning of its first sentence.

    >>> task(ROOT / "examples" / "multi_token.py")
    'Multi-token prediction'
    """
    if path.suffix == ".ipynb":
        return "A notebook"
    return re.split(r"[:.](?:\s|$)", path.read_text(encoding="utf-8")[3:], maxsplit=1)[0]


def _cells(path: Path) -> Iterator[tuple[str, str]]:
    """The text, the commands and the code of an example, each as (kind, text)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        _, about, code = text.split('"""', 2)
        for paragraph in about.strip().split("\n\n"):
            command = re.match(r"\s*(python|torchrun|fpipe) ", paragraph)
            yield "sh" if command else "markdown", textwrap.dedent(paragraph).replace("``", "`")
        yield "python", code.strip()
        return
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = re.sub(r"^#+", "###", source, flags=re.M)
        yield "markdown" if cell["cell_type"] == "markdown" else "python", source


# ---- the schedules ----
class Facts(NamedTuple):
    """Published facts about a schedule; a test compares the formula of the total with the
    simulator.
    """

    paper: str
    arxiv: str
    total: str  #: for p ranks, m microbatches, and F = I = W = 1 for all stages of a rank together
    peak: str
    formula: Callable[[int, int], float] | None = None
    needs: str = ""


FACTS = {
    "GPipe": Facts(
        "Huang et al. 2019", "1811.06965", "(m + p - 1)(F + B)", "m", lambda p, m: 3 * (m + p - 1)
    ),
    "1F1B": Facts(
        "Narayanan et al. 2021; Fan et al. 2021",
        "2006.09503",
        "(m + p - 1)(F + B)",
        "p - r",
        lambda p, m: 3 * (m + p - 1),
    ),
    "Interleaved1F1B": Facts(
        "Narayanan et al. 2021",
        "2104.04473",
        "m(F + B) + (p - 1)(F + B)/v",
        "p + (p - 1)/v",
        lambda p, m: 3 * m + 3 * (p - 1) / 2,
    ),
    "LoopedBFS": Facts(
        "Lamy-Poirier 2023",
        "2211.05953",
        "m(F + B) + (p - 1)(F + B)/v",
        "m",
        lambda p, m: 3 * m + 3 * (p - 1) / 2,
    ),
    "InterleavedZeroBubble": Facts(
        "Qi et al. 2024",
        "2401.10241",
        "m(F + B) + (p - 1)(F + I - W)/v",
        "p",
        lambda p, m: 3 * m + (p - 1) / 2,
    ),
    "ZBVZeroBubble": Facts(
        "Qi et al. 2024",
        "2401.10241",
        "m(F + B) + (p - 1)/2; span m(F + B)",
        "p",
        lambda p, m: 3 * m + (p - 1) / 2,
    ),
    "DualPipeV": Facts(
        "DeepSeek-AI 2024",
        "2412.19437",
        "m(F + B) + (p - 1)(F&B + B - 3W)/2, F&B = F + B",
        "p + 1/2",
        lambda p, m: 3 * m + (p - 1),
        "m >= 2p for its full form",
    ),
    "Eager1F1B": Facts(
        "Zhuang et al. 2022",
        "2211.05322",
        "(m + p - 1)(F + B)",
        "2(p - r) - 1",
        lambda p, m: 3 * (m + p - 1),
    ),
    "Overlapped1F1B": Facts(
        "Zhuang et al. 2022, its warm-up",
        "2211.05322",
        "(m + p - 1)(F + B), F&B = F + B",
        "2(p - r)",
        lambda p, m: 3 * (m + p - 1),
    ),
    "ZBH1": Facts(
        "Qi et al. 2024",
        "2401.10241",
        "m(F + B) + (p - 1)(F + I - W)",
        "p",
        lambda p, m: 3 * m + p - 1,
    ),
    "ZBH2": Facts(
        "Qi et al. 2024",
        "2401.10241",
        "m(F + B) + (p - 1)F; span m(F + B)",
        "2p - 1",
        lambda p, m: 3 * m + p - 1,
    ),
    "ZB1P": Facts(
        "Qi et al. 2024, section 3", "2401.10241", "by search, at most p activations", "p"
    ),
    "ZB2P": Facts(
        "Qi et al. 2024, section 3", "2401.10241", "by search, at most 2p activations", "2p"
    ),
    "VHalf": Facts("Qi et al. 2024", "2405.15362", "by search on a building block", "(p + 2) // 2"),
    "VMin": Facts("Qi et al. 2024", "2405.15362", "by search on a building block", "(p + 4) // 3"),
    "DualPipe": Facts(
        "DeepSeek-AI 2024",
        "2412.19437",
        "m(F + B) + (p/2 - 1)(F&B + B - 3W), F&B = F + B",
        "p + 1",
        lambda p, m: 3 * m + p - 2,
        "p even; each stage is on two ranks",
    ),
    "Chimera": Facts(
        "Li and Hoefler 2021",
        "2107.06925",
        "idle p - 2 passes at F = B",
        "p/2 + 1 to p",
        None,
        "p even; each stage is on two ranks",
    ),
    "Hanayo": Facts("Liu et al. 2023", "2308.15762", "m(F + B) + (p - 1)(F + B)/2w at F = B", "p"),
    "Seq1F1B": Facts(
        "Sun et al. 2024",
        "2406.03488",
        "m(F + B) + (p - 1)(F + B)/k for k slices",
        "(p - r + k - 1)/k",
        lambda p, m: 3 * m + 3 * (p - 1) / K,
        "stages that pass a carry from slice to slice",
    ),
    "SeqZBH1": Facts(
        "Sun et al. 2024; Qi et al. 2024",
        "2406.03488",
        "m(F + B) + (p - 1)(F + I - W)/k for k slices",
        "(p - r + k - 1)/k",
        lambda p, m: 3 * m + (p - 1) / K,
        "stages that pass a carry from slice to slice",
    ),
}
#: names as papers write them, which the search finds in headings
WRITTEN = {
    "ZBVZeroBubble": "ZB-V",
    "DualPipeV": "DualPipe-V",
    "ZBH1": "ZB-H1",
    "ZBH2": "ZB-H2",
    "ZB1P": "ZB-1P",
    "ZB2P": "ZB-2P",
    "VHalf": "V-Half",
    "VMin": "V-Min",
}
P, M, K = 4, 8, 2


def zoo() -> tuple[str, dict[str, bytes]]:
    """The page of all schedules, and its pictures by path."""
    lines = [
        "# All schedules",
        "",
        f"All pictures are drawn by `fpipe draw` for {P} ranks and {M} microbatches. F, I and W "
        "of all stages of a",
        "rank together cost 1 each, and B = I + W. The total is the time of a step, from the first "
        "start to the last end of all ranks.",
        "The bubble is 1 - work/span, where the span is the longest time from the first start to "
        "the last end of a rank. Activations are counted in units",
        "of one microbatch on all stages of a rank. p is the number of ranks, m the number of "
        "microbatches, r a rank,",
        "v the number of stages per rank, w the number of waves, k the number of slices of a "
        "microbatch,",
        f"which is {K} in the pictures.",
        "",
        "[Choose a schedule](howto/choose.md) · [Schedule explorer](explorer.md) · "
        "`fpipe compare` compares",
        "all of them for other counts and costs",
        "",
    ]
    pictures: dict[str, bytes] = {}
    for name in fpipe.schedule_names():
        if name not in FACTS:
            continue  # registered by a user
        schedule = fpipe.make_schedule(name, P, M, slices=K if orders_slices(name) else 1)
        timeline = schedule.simulate(per="rank")
        facts = FACTS[name]
        about = inspect.getdoc(catalogue.ENTRIES[catalogue.key(name)].make).partition(">>>")[0]
        pictures[f"zoo/{name}.svg"] = svg(timeline)
        pictures[f"zoo/{name}-phone.svg"] = svg(timeline, width=390)
        peak = " ".join(f"{value:g}" for value in timeline.peak_bytes)
        lines += [
            f"## {f'{name} ({WRITTEN[name]})' if name in WRITTEN else name} {{#{name.lower()}}}",
            "",
            about.replace("``", "`").strip(),
            "",
            "<picture>",
            f'  <source media="(max-width: 600px)" srcset="zoo/{name}-phone.svg">',
            f'  <img src="zoo/{name}.svg" alt="{name}, {P} ranks, {M} microbatches">',
            "</picture>",
            "",
            "| | |",
            "|---|---|",
            f"| paper | {facts.paper}, [arXiv:{facts.arxiv}]"
            f"(https://arxiv.org/abs/{facts.arxiv}) |",
            f"| total | {facts.total} |",
            f"| in the picture | total {timeline.total:g}, bubble {timeline.bubble:.1%} |",
            f"| activations held | {facts.peak}; in the picture, by rank: {peak} |",
            *([f"| needs | {facts.needs} |"] if facts.needs else []),
            "",
            "```text",
            inspect.cleandoc(_module_of(name).__doc__ or ""),
            "```",
            "",
        ]
    return "\n".join(lines), pictures


def _module_of(name: str) -> Any:
    return sys.modules[
        next(entry.make for entry in catalogue.TABLE if entry.name == name).__module__
    ]


def svg(timeline: fpipe.Timeline, width: float | None = None) -> bytes:
    """The SVG picture of a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "picture.svg")
        timeline.save(path, width=width)
        return path.read_bytes()


# ---- the reference ----
#: page of reference/ -> its title
REFERENCE = {
    "pipelines": "Pipelines",
    "stages": "Stages and batches",
    "schedules": "Schedules",
    "simulation": "Simulation and search",
    "ranks": "Ranks and devices",
    "transforms": "Gradient transforms",
    "runs": "Runs, checkpoints and errors",
    "interop": "Interoperation and tests",
}
#: page of reference/ -> what it is about
ABOUT = {
    "pipelines": "A pipeline is a function of parameters and a batch. Transforms of it return "
    "gradients.",
    "stages": "A stage is a function of its parameters and its input. Modules are cut into stages, "
    "batches into microbatches.",
    "schedules": "A schedule is a table of actions, with one row for each rank. This page has the "
    "functions that make schedules, then actions, and placements, which say what rank has which "
    "stage.",
    "simulation": "`Costs` say what actions take. "
    "[`Schedule.simulate(costs)`](schedules.md#fpipe.Schedule.simulate) returns a `Timeline`. "
    "`solve` searches for a schedule, `balance` for equal stages.",
    "ranks": "A group has the ranks of a pipeline, in this process or in many. Each has a device.",
    "transforms": "Optimizers, and other functions of gradients, are pairs of `init` and `update`.",
    "runs": "Training loops, checkpoints, measurements and errors.",
    "interop": "Models and trainers of other libraries, and tests without processes.",
}
#: title of a section -> its page, and its names, or a public module. Each name is in one section.
SECTIONS = {
    "Pipelines and their gradients": (
        "pipelines",
        "pipeline value_and_grad grad vjp Pipeline weighted copies auto",
    ),
    "Other derivatives": ("pipelines", "per_example"),
    "Stages": ("stages", "Stage block chunked_cross_entropy remat"),
    "Modules": ("stages", "from_module to_module"),
    "Batches": ("stages", "Microbatches elsewhere pack pad"),
    "Programs of a stage": ("stages", "Programs trace"),
    "Schedules": ("schedules", "make_schedule schedule_names register_schedule Schedule"),
    "Actions and placements": ("schedules", "Action Fused Slice Placement"),
    "Costs and times": ("simulation", "Costs Timeline"),
    "Search": ("simulation", "Solved balance solve"),
    "Ranks and processes": ("ranks", "adopt elastic init launch local"),
    "Devices": ("ranks", "devices"),
    "Collectives in a stage": ("ranks", "ops"),
    "Optimizers": ("transforms", "adamw sgd from_torch master apply_updates"),
    "Transforms of gradients": (
        "transforms",
        "Transform cast chain clip_by_global_norm dynamic_loss_scale global_norm masked mean_over "
        "partition scale scale_by_schedule skip_nonfinite",
    ),
    "All transforms": ("transforms", "transforms"),
    "Checkpoints and runs": ("runs", "Epochs Loop load receive save stream"),
    "Measuring and debugging": ("runs", "debug measure_costs profile"),
    "Errors": ("runs", "FpipeError errors"),
    "Other libraries": ("interop", "interop"),
    "Tests": ("interop", "testing"),
}

#: function or class -> its arguments in groups, those of every day first
GROUPS = {
    "fpipe.pipeline": {
        "What runs": "stages schedule loss microbatches group",
        "Parameters and numbers": "reduction accumulate frozen tied seed",
        "Copies, slices and outputs": "dp slices outputs",
        "How stages run": "engine compile overlap order more",
    },
    "fpipe.Stage": {
        "What runs": "fn aux_loss engine compile",
        "Parameters and names": "frozen ties name layers weights",
        "State, and a carry from slice to slice": "state initial_state carry initial_carry",
        "What is known without a trace": "like dynamic",
    },
    "fpipe.Costs": {
        "Times of actions": "F I W B overlap unit",
        "Times of messages": "comm boundary bandwidth send receive",
        "Memory": "saved kept",
        "Microbatches that differ": "load size",
    },
}
#: class -> members that few users need: they come last
RARE = {"fpipe.Pipeline": "captured under rerouted refuse rehearse"}


def reference() -> dict[str, str]:
    """The pages of the reference: every public name with its signature and docstring; a name
    without a docstring raises ValueError.
    """
    listed = [name for _, names in SECTIONS.values() for name in names.split()]
    if sorted(listed) != sorted(fpipe.__all__):
        wrong = sorted(set(listed) ^ set(fpipe.__all__)) or "a name twice"
        raise ValueError(f"SECTIONS and fpipe.__all__ differ: {wrong}")
    return {f"reference/{page}.md": _page(page) for page in REFERENCE}


def _page(page: str) -> str:
    lines = [
        f"# {REFERENCE[page]}",
        "",
        f"{ABOUT[page]} [All of fpipe](../all.md) has one line for each name.",
        "",
    ]
    here = {title: names.split() for title, (where, names) in SECTIONS.items() if where == page}
    for title, names in here.items():
        lines.append(f"* {title}: {', '.join(f'[`{name}`](#fpipe.{name})' for name in names)}")
    for title, names in here.items():
        lines += ["", f"## {title}", ""]
        for name in names:
            lines += entry(f"fpipe.{name}", getattr(fpipe, name))
    return "\n".join([*lines, *_types_of_page(page)])


def overview() -> str:
    """Every public name in one line: a link to its entry, and the first sentence of its
    docstring.
    """
    lines = [
        "# All of fpipe",
        "",
        "Every public name, by what it is for, with the first sentence of its entry in the "
        "reference.",
        "",
    ]
    for page, title in REFERENCE.items():
        lines += [f"## {title}", ""]
        for section, (where, names) in SECTIONS.items():
            if where != page:
                continue
            lines += [f"**{section}**", ""]
            for name in names.split():
                value = getattr(fpipe, name)
                lines.append(_line(page, f"fpipe.{name}", value))
                if inspect.ismodule(value):
                    lines += [
                        _line(page, member, inner)
                        for member, inner in members(f"fpipe.{name}", value)
                        if not is_of_fpipe(inner)  # which has a line above
                    ]
            lines.append("")
    return "\n".join(lines)


def _line(page: str, name: str, value: Any) -> str:
    text = text_of(value, name).partition("\n\n")[0].replace("\n", " ")
    text = re.sub(r"\[(`[^`]*`)\]\([^)]*\)", r"\1", text)  # links from the pages of the reference
    return f"* [`{name}`](reference/{page}.md#{name}): {re.split(r'(?<=[.]) ', text)[0]}"


#: Classes that only the library creates: they have no signature in the reference.
RETURNED = (
    "fpipe.Pipeline",
    "fpipe.Programs",
    "fpipe.Timeline",
    "fpipe.Solved",
    "fpipe.interop.Bound",
    "fpipe.testing.Outcome",
)
#: What functions return and users read, though no public name is it: function -> its class.
RESULTS = {
    "fpipe.Pipeline.plan": "fpipe.engine.plan_report:Plans",
    "fpipe.Pipeline.explain": "fpipe.products.explanation.page:Explanation",
    "fpipe.vjp": "fpipe.engine.signatures:Pullback",
    "fpipe.per_example": "fpipe.passes.derived.per_example:PerExample",
    "fpipe.Timeline.of_rank": "fpipe.actions.timeline:Span",
    "fpipe.Timeline.waited_for": "fpipe.actions.timeline:Wait",
    "fpipe.balance": "fpipe.products.search.balancing:Balance",
    "fpipe.save": "fpipe.saving.writing:Saving",
    "fpipe.Loop.run": "fpipe.products.training.loop:Trained",
    "fpipe.profile": "fpipe.passes.profile.profiling:Profile",
}
#: Members without an underscore that other packages of fpipe use, and users do not.
HIDDEN = {
    "fpipe.Pipeline": "call parts stepper",
    "fpipe.Programs": "held added_by adding dys daux roles",
    "fpipe.Schedule": "digest",
    "fpipe.Placement": "path_index",
    "fpipe.Costs": "spread links of_units",
    "fpipe.devices": "keep_freed",
    "fpipe.profile.Profile": "priced",
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public name with its value: those of ``fpipe``, then the members of its classes and
    modules.
    """
    for name in [*fpipe._NAMES, *fpipe._MODULES]:
        value = getattr(fpipe, name)
        yield f"fpipe.{name}", value
        for member, inner in members(f"fpipe.{name}", value) if name != "errors" else ():
            yield member, inner
            if not is_of_fpipe(inner):
                yield from members(member, inner)


#: What is read like an attribute.
PROPERTIES = (property, cached_property)


def is_of_fpipe(value: Any) -> bool:
    """Whether a member of a module has an entry as one of ``fpipe`` too."""
    return _plain(getattr(fpipe, getattr(value, "__name__", ""), None)) is _plain(value)


def bases(value: Any) -> dict[type, str]:
    """The public classes from which a class inherits, with their names. Their members are not
    repeated.
    """
    public = {getattr(fpipe, name): name for name in fpipe._NAMES}
    return {cls: public[cls] for cls in value.__mro__[1:] if cls in public}


def members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Public classes and functions of a module; public methods and properties of a class."""
    if inspect.ismodule(value):
        found = {member: getattr(value, member) for member in getattr(value, "__all__", ())}
        found = {
            key: member
            for key, member in found.items()
            if inspect.isclass(member) or inspect.isfunction(member)
        }
    elif inspect.isclass(value) and not issubclass(value, BaseException):
        ours = [
            cls
            for cls in value.__mro__
            if cls.__module__.startswith("fpipe") and cls not in bases(value)
        ]
        found = {
            member: getattr(value, member)
            for cls in reversed(ours)
            for member, kept in vars(cls).items()
            if callable(kept) or isinstance(kept, (*PROPERTIES, classmethod, staticmethod))
        }
    else:
        found = {}
    for member, inner in found.items():
        shown = not member.startswith("_") or (
            member == "__call__" and inner.__doc__ and inspect.isclass(value)
        )
        if shown and member not in HIDDEN.get(name, "").split():
            yield f"{name}.{member}", inner


def entry(name: str, value: Any, level: str = "###") -> list[str]:
    """The entry of one name: signature, docstring, members."""
    heading = name.replace("_" * 2, r"\_\_")  # Markdown makes bold of __call__
    lines = [f"{level} {heading} {{#{name.replace('_' * 2, '')}}}", ""]
    if callable(value) and name not in RETURNED:
        lines += [linked_signature(name, value), ""]
    summary, _, rest = text_of(value, name).partition("\n\n")
    lines += [summary, ""]
    lines += [rest, "", *result(name, level)]
    for base in bases(value).values() if inspect.isclass(value) else ():
        lines += [f"It has all members of {_linked(base, f'fpipe.{base}')} too.", ""]
    if name != "fpipe.errors" or not inspect.ismodule(value):
        rare = [f"{name}.{member}" for member in RARE.get(name, "").split()]
        for member, inner in sorted(members(name, value), key=lambda item: item[0] in rare):
            if member in rare[:1]:
                lines += [f"### {name}: members that few programs need {{#{name}.rare}}", ""]
            if is_of_fpipe(inner):
                lines += [f"### {member} {{#{member}}}", ""]
                lines += [f"The same as {_linked(inner.__name__)}.", ""]
            else:
                lines += entry(member, inner, "###" if inspect.ismodule(value) else "####")
    return lines


def result(name: str, level: str = "###") -> list[str]:
    """The entry of what a function returns: a class with its public members."""
    if name not in RESULTS:
        return []
    cls = _result_class(name)
    lines = [f"{level}# Result: {cls.__name__} {{#{_place_of_result(name)}}}", ""]
    lines += [markdown(inspect.getdoc(cls) or "", name), ""]
    for member, inner in members(_place_of_result(name), cls):
        last = member.rpartition(".")[2]
        doc = sections(inspect.getdoc(inner) or "")
        if not "".join(doc[""]):
            raise ValueError(f"{cls.__name__}.{last}, the result of {name}, has no docstring")
        said = [" ".join(filter(None, _without_tail(doc)))]
        for item in doc.get("Raises:", ()):
            error, _, why = item.partition(": ")
            said.append(f"Raises ``{error}``: {why}")
        call = ""
        if callable(inner):
            call = "".join(line.strip() + " " * line.endswith(",") for line in signature("", inner))
        code = "result" + f".{last}" * (last != "__call__") + call.replace(", )", ")")
        lines.append(f"* `{code}`: {markdown(' '.join(said), name)}")
    return [*lines, ""]


def _result_class(name: str) -> Any:
    module, _, cls = RESULTS[name].partition(":")
    return getattr(import_module(module), cls)


def _place_of_result(name: str) -> str:
    return f"{name}.{RESULTS[name].rpartition(':')[2]}"


def linked_signature(name: str, value: Any) -> str:
    """A signature as HTML, in which each type of the package links to what it is."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    code = "\n".join(signature(name, value))
    shown = highlight(code, PythonLexer(), HtmlFormatter(nowrap=True)).strip()
    page = _page_of(name)

    def link(token: re.Match[str]) -> str:
        one = next(filter(None, (types_of.found(m, token[1]) for m in _modules_of(value))), None)
        if name in RESULTS and token[1] == _result_class(name).__name__:
            return f'<a href="#{_place_of_result(name)}">{token[1]}</a>'
        if one is None:
            return token[0]
        title = html.escape(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _about(one)).replace("`", ""))
        return f'<a href="{_href(one, page)}" title="{title}">{token[1]}</a>'

    linked = re.sub(r'<span class="n">([A-Z]\w+)</span>', link, shown)
    return f'<div class="highlight signature"><pre><code>{linked}</code></pre></div>'


def _modules_of(value: Any) -> list[str]:
    """The modules whose names the signature of a value has."""
    value = inspect.unwrap(getattr(value, "__func__", value))
    classes = value.__mro__ if inspect.isclass(value) else (value,)
    return [cls.__module__ for cls in classes if cls.__module__.startswith("fpipe")]


def _page_of(name: str) -> str:
    top = name.split(".")[1]
    return next(page for page, names in SECTIONS.values() if top in names.split())


@cache
def _entries() -> dict[int, str]:
    """The name of each class that has an entry, by its identity."""
    return {id(value): name for name, value in reversed(list(public())) if inspect.isclass(value)}


def _href(one: types_of.Type, page: str) -> str:
    """Where a type is explained, from a page of the reference: its entry, that of the function
    which returns it, or the list at the end of the page.
    """
    name = _entries().get(id(one.value)) if not one.alias else None
    place = name
    for function, cls in RESULTS.items():
        if cls == f"{one.module}:{one.name}":
            name, place = function, _place_of_result(function)
    if name is None or place is None:
        return f"#{_place_of_type(page, one)}"
    there = _page_of(name)
    return f"#{place}" if there == page else f"{there}.html#{place}"


#: page of the reference -> the types that its signatures name and that have no entry, by place
_NAMED: dict[str, dict[str, types_of.Type]] = {}


def _place_of_type(page: str, one: types_of.Type) -> str:
    """Where the list at the end of a page has a type; it has those that it names too."""
    listed = _NAMED.setdefault(page, {})
    place = f"type.{one.name}"
    if listed.get(place, one) != one:  # two modules have the name
        place = f"type.{one.module.rpartition('.')[2]}.{one.name}"
    if place not in listed:
        listed[place] = one
        for name in one.names:
            inner = types_of.found(one.module, name)
            if inner and _href(inner, page).startswith("#type."):
                _place_of_type(page, inner)
    return place


def _about(one: types_of.Type) -> str:
    """What a type is, in a line of markdown."""
    said = markdown(one.about.partition("\n\n")[0].replace("\n", " "))
    said = said[:1].upper() + said[1:]
    if said and not said.endswith("."):
        said += "."
    return " ".join(filter(None, (one.alias and f"`{one.alias}`.", said)))


def _types_of_page(page: str) -> list[str]:
    """The list of types at the end of a page."""
    listed = _NAMED.pop(page, {})
    if not listed:
        return []
    lines = ["## Types in signatures", ""]
    for place, one in sorted(listed.items(), key=lambda item: item[1].name):
        lines.append(f'* <span id="{place}"></span>`{one.name}`: {_about(one)}')
    return [*lines, ""]


class _Text(str):
    """An annotation that is shown without quotes."""

    __repr__ = str.__str__


#: How Python shows a default that is a function or another object.
OBJECT = re.compile(r"<(?:function|class|object|built-in)(?:<\w+>|[^<>])*>")


def signature(name: str, value: Any) -> list[str]:
    """The call of a callable as lines: in one, or with a line for each parameter; without modules
    of types.
    """
    try:
        sign = inspect.signature(value)
    except (TypeError, ValueError):
        return [f"{name}(...)"]
    shown = [
        each.replace(annotation=_annotation(each.annotation))
        for key, each in sign.parameters.items()
        if key != "self"
    ]
    result = sign.empty if inspect.isclass(value) else _annotation(sign.return_annotation)
    sign = sign.replace(parameters=shown, return_annotation=result)
    if name in RESULTS and result == "Any":
        sign = sign.replace(return_annotation=_Text(_result_class(name).__name__))
    text = OBJECT.sub("...", f"{name}{sign}")
    if len(text) <= 96:
        return [text]
    lines = OBJECT.sub("...", "\n".join(map(str, shown))).splitlines()
    kinds = [each.kind for each in shown]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = "" if sign.return_annotation is sign.empty else f" -> {sign.return_annotation}"
    return [f"{name}(", *(f"    {line}," for line in lines), f"){end}"]


def _annotation(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return (
        _Text(re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text))
        if isinstance(text, str)
        else annotation
    )


def text_of(value: Any, name: str) -> str:
    """A docstring as markdown."""
    doc = inspect.getdoc(value)
    if not doc:
        raise ValueError(f"{name} is public and has no docstring")
    lines = "".join(f">>> {line}\n" for line in imports(doc, value))
    doc = re.sub(r"^>>> ", lambda first: lines + first[0], doc, count=1, flags=re.M)
    return markdown(_merged(doc), name)


def _merged(doc: str) -> str:
    """An example with one import of each module.

    >>> _merged(">>> import a\\n>>> from b import c\\n>>> from b import d\\n>>> c(d)")
    '>>> import a\\n>>> from b import c, d\\n>>> c(d)'
    """
    parts: dict[str, list[str]] = {}
    lines = doc.splitlines()
    out: list[str] = []
    for line in lines:
        one = re.match(r">>> from ([\w.]+) import ([\w, ]+)$", line)
        if one and one[1] not in parts:
            out.append(one[1])
        if one:
            kept = parts.setdefault(one[1], [])
            kept += [name for name in one[2].split(", ") if name not in kept]
        else:
            out.append(line)
    whole = {
        module: f">>> from {module} import {', '.join(names)}" for module, names in parts.items()
    }
    return "\n".join(whole.get(line, line) for line in out)


def imports(doc: str, value: Any) -> list[str]:
    """The imports that a reader of an example needs: doctests have the names of their module.

    >>> imports(">>> value_and_grad(torch.ones, nn.Linear)", fpipe.value_and_grad)
    ['import torch', 'from fpipe import value_and_grad']
    """
    source = "".join(example.source for example in doctest.DocTestParser().get_examples(doc))
    value = getattr(value, "fget", getattr(value, "func", value))  # of properties
    module = sys.modules[getattr(inspect.unwrap(value), "__module__", None) or "fpipe"]
    there = value if inspect.ismodule(value) else module
    whole: list[str] = []
    parts: dict[str, list[str]] = {}
    for name in _free(compile(source, "example", "exec")):
        one = getattr(there, name, None)
        if isinstance(one, ModuleType):
            package, _, last = one.__name__.rpartition(".")
            plain = f"import {one.__name__}" + (f" as {name}" if name != one.__name__ else "")
            whole.append(f"from {package} import {name}" if package and last == name else plain)
        elif one is not None:
            owner = sys.modules[str(getattr(one, "__module__", "fpipe")).partition(".")[0]]
            homes = (fpipe, *PACKAGES, owner, there)
            home = next(h.__name__ for h in homes if _plain(getattr(h, name, None)) is _plain(one))
            parts.setdefault(home, []).append(name)
    return whole + [f"from {home} import {', '.join(names)}" for home, names in parts.items()]


def _plain(value: Any) -> Any:
    """A function without what checks its arguments."""
    return inspect.unwrap(value) if callable(value) else value


#: public packages, whose names are not those of fpipe
PACKAGES = fpipe.interop, fpipe.testing, fpipe.transforms, fpipe.devices, fpipe.errors


def _free(code: CodeType) -> dict[str, None]:
    """The names that code reads and does not bind, in the order in which it reads them."""
    steps = list(dis.get_instructions(code))
    read = {s.argval: None for s in steps if s.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    for inner in filter(inspect.iscode, code.co_consts):
        read |= _free(inner)
    bound = {s.argval for s in steps if s.opname == "STORE_NAME"}
    return {name: None for name in read if name not in bound}


#: The beginning of what a call returns, in a docstring.
CALL = re.compile(r"``.*?``.*?: ")

#: Sections of a docstring.
HEADS = ("Args:", "Returns:", "Raises:")


def sections(doc: str) -> dict[str, list[str]]:
    """The text of each section of a docstring: its items, each in one line; "" is all other text.

    >>> sections("Do.\\n\\nArgs:\\n    x, y: what\\n    is done.\\n    z: more.\\n\\n>>> 1")
    {'': ['Do.', '', '>>> 1'], 'Args:': ['x, y: what is done.', 'z: more.']}
    """
    out: dict[str, list[str]] = {"": []}
    head = ""
    for line in doc.splitlines():
        if line in HEADS:
            head = line
            out[head] = []
        elif not line.startswith("    ") and line:
            head = ""
        if not head:
            out[""].append(line)
        elif (
            out[head] and line.strip() and not re.match(r"    (``.*?``.*?|[\w*][\w*, .]*): ", line)
        ):
            out[head][-1] += " " + line.strip()
        elif line.strip() and line not in HEADS:
            out[head].append(line.strip())
    return out


#: The beginning of a statement that contains others.
COMPOUND = re.compile(r"(@|(async|class|def|for|if|try|while|with)\b)")


def markdown(doc: str, name: str = "") -> str:
    """reStructuredText of docstrings as markdown: sections as lists, single backquotes, doctests in
    fences as code that can be copied, with results as comments. Names of ``fpipe`` are links, but
    for ``name`` itself.

    >>> print(markdown(">>> 1 + 1\\n2").strip())
    ```py
    1 + 1
    # 2
    ```
    """
    out: list[str] = []
    found = sections(doc)
    fenced = open_before = False
    for line in (
        doc.splitlines()
        if len(found) == 1
        else [*_without_tail(found), *_tail(found), *_lists(found, name)]
    ):
        if "```" in line:
            open_before = not open_before
        if not fenced and not open_before and line.lstrip().startswith(">>>"):
            out += ["", "```py"]
            fenced = True
            statement = ""
        elif fenced and not line.strip():
            out.append("```")
            fenced = False
        line = line.replace("  # doctest: +SKIP", "")
        if fenced and line:
            found_code = re.match(r"\s*(>>>|\.\.\.) ?(.*)", line)
            line = found_code[2] if found_code else f"# {line.lstrip()}"
            if found_code and found_code[1] == ">>>":
                if COMPOUND.match(statement):
                    out.append("")  # the prompt of Python needs it
                statement = line
        if not fenced and not open_before:
            line = re.sub(
                r":(?:func|class|meth|mod):`([^`]*)`",
                lambda role: _linked(role[1]),
                line.replace("``", "`"),
            ).replace("::", ":")
            line = _links(line, name)
        out.append(line)
    return "\n".join([*out, *(["```"] if fenced else [])])


def _linked(name: str, shown: str = "") -> str:
    """A name as code, with a link to its entry if it is one of ``fpipe``."""
    place = f"fpipe.{name.removeprefix('fpipe.')}"
    code = f"`{shown or name}`"
    return f"[{code}]({_page_of(place)}.md#{_anchor(place)})" if place in _names() else code


@cache
def _names() -> frozenset[str]:
    return frozenset({name for name, _ in public()} | {f"fpipe.errors.{e}" for e in ERRORS})


#: The errors, which have one entry.
ERRORS = [name for name, value in vars(fpipe.errors).items() if inspect.isclass(value)]


def _anchor(name: str) -> str:
    return "fpipe.errors" if name.startswith("fpipe.errors.") else name.replace("__", "")


def _links(line: str, own: str) -> str:
    """Links in place of code that is a name of ``fpipe`` or a call of one: ``fpipe.name``, or a
    name that is no plain word. The name ``own`` stays code.

    >>> _links("`fpipe.auto(memory=)` or `scale`", "")
    '[`fpipe.auto(memory=)`](pipelines.md#fpipe.auto) or `scale`'
    """

    def link(code: re.Match[str]) -> str:
        whole, name = code[1], code[2]
        if name in ERRORS and f"fpipe.{name}" not in _names():
            return _linked(f"errors.{name}", whole)
        plain = name.removeprefix("fpipe.")
        word = plain == name and not re.search("[A-Z_]", name)
        if word or f"fpipe.{plain}" == own:
            return code[0]
        return _linked(plain, whole)

    return re.sub(r"(?<![\[`])`((fpipe\.[\w.]+|\w+(?:\.\w+)*)(?:\([^`]*)?)`(?![\]`])", link, line)


def _example(found: dict[str, list[str]]) -> int:
    """Where the example begins in the text outside of sections."""
    lines = found[""]
    return next((i for i, line in enumerate(lines) if line.startswith(">>>")), len(lines))


def _without_tail(found: dict[str, list[str]]) -> list[str]:
    return found[""][: _example(found)]


def _tail(found: dict[str, list[str]]) -> list[str]:
    return ["", *found[""][_example(found) :]]


def _lists(found: dict[str, list[str]], name: str) -> Iterator[str]:
    """The sections as lists; names of arguments and errors are code."""
    for head in HEADS:
        items = found.get(head, [])
        if items:
            yield from ("", f"**{head[:-1]}**", "")
        if head == "Returns:" and not any(map(CALL.match, items)):
            yield " ".join(items)
        elif head == "Returns:":
            yield from (*items[:1], "", *(f"* {item}" for item in items[1:]))
        elif head == "Args:" and name in GROUPS:
            yield from _grouped(items, name)
        else:
            yield from map(_item, items)


def _grouped(items: list[str], name: str) -> Iterator[str]:
    """The arguments in their groups, a list below each title."""
    said = {item.partition(":")[0]: item for item in items}
    groups = {title: names.split() for title, names in GROUPS[name].items()}
    if wrong := said.keys() ^ {arg for args in groups.values() for arg in args}:
        raise ValueError(f"GROUPS and the arguments of {name} differ: {sorted(wrong)}")
    for title, args in groups.items():
        yield from (f"*{title}*", "", *(_item(said[arg]) for arg in args), "")


def _item(item: str) -> str:
    names, _, text = item.partition(": ")
    if not text:
        return f"* {item}"
    return f"* {', '.join(f'`{name}`' for name in names.split(', '))}: {text}"


# ---- mkdocs ----
#: Pages that are written by functions of this file.
GENERATED = (
    "examples.md",
    "zoo.md",
    "published.md",
    "all.md",
    *(f"reference/{page}.md" for page in REFERENCE),
)


def on_config(config: Any) -> Any:
    """Remove missing pages from the navigation, and append pages that it omits."""
    there = {
        path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md")
    }
    pages = there | {*COPIED, *GENERATED}
    listed: set[str] = set()

    def existing(items: list[Any]) -> list[Any]:
        out = []
        for item in items:
            ((title, value),) = item.items()
            if isinstance(value, list):
                out.append({title: existing(value)})
            elif value in pages:
                listed.add(value)
                out.append(item)
        return out

    config.nav = existing(config.nav)
    config.nav += [
        {Path(name).stem.replace("_", " ").capitalize(): name} for name in sorted(pages - listed)
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    page, pictures = zoo()
    generated: dict[str, str | bytes] = {
        "examples.md": examples(),
        "zoo.md": page,
        "published.md": published.page(FACTS),
        "all.md": overview(),
        **reference(),
    }
    generated["fpipe.html"] = explorer.page()
    generated |= pictures | {page: copied(name) for page, name in COPIED.items()}
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


#: page -> a factor of its score in the search
BOOST = {
    "install.md": 2,
    "reference/pipelines.md": 2,
    "howto/checkpoints.md": 2,
    "howto/choose.md": 3,
    "howto/migrate.md": 2,
    "howto/pipelining.md": 3,
    "howto/memory.md": 0.8,
    "glossary.md": 4,
    "howto/hang.md": 2,
    "howto/schedule.md": 2,
    "changelog.md": 0.3,
}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link the examples that a page names, and the files of the repository that are pages."""
    page.meta["search"] = {"boost": BOOST.get(page.file.src_uri, 1)}
    up = "../" * page.file.src_uri.count("/")
    for copy, file in COPIED.items():
        markdown = markdown.replace(f"]({up}../{file}", f"]({up}{copy}")
    return re.sub(
        r"(?<!\[)`examples/(?:cluster/)?(\w+)(?:\.\w+)?`(?!\])",
        rf"[\g<0>]({up}examples.md#\1)",
        markdown,
    )


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Shorten names in the contents of a page of the reference, let outputs wrap that have an
    error, and leave other code out of the search, whose excerpts are sentences.
    """
    if page.file.src_uri.startswith("reference/"):
        shorten(page.toc)
    return wrapped(html).replace('class="highlight"', 'class="highlight" data-search-exclude')


def wrapped(html: str) -> str:
    """Mark outputs that have the message of an error; lines of drawings and code never wrap.

    >>> wrapped('<div class="highlight"><pre><span></span><code>StageError: no.</code></pre></div>')
    '<div class="highlight prose"><pre><span></span><code>StageError: no.</code></pre></div>'
    """
    return re.sub(
        r'<div class="highlight">(?=<pre><span></span><code>(?:[^<]*\n)?\w+Error: [^<]*</code>)',
        '<div class="highlight prose">',
        html,
    )


def shorten(items: Any) -> None:
    """Remove the name of the package from the titles of headings."""
    for item in items:
        item.title = item.title.removeprefix("fpipe.")
        shorten(item.children)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Raise ValueError if a page loads a file from a network: the docs must be readable offline."""
    remote = re.search(
        r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>", output
    )
    if remote:
        raise ValueError(f"{page.file.src_path} loads {remote[0]}; keep a copy of it in docs/")
    return output
