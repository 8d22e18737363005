"""Sphinx: `make docs`. What it does not do by itself stands here: formulas as MathML, and the figures of the ladder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

project = "ndsoftmax"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
html_title = "ndsoftmax"
html_math_renderer = "mathml"
exclude_patterns = ["_build"]

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("source-read", _insert_figures)


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    formula = convert(node.astext(), display="block")
    # room above and below: the theme's box around it cuts off what sticks out
    translator.body.append(formula.replace("<math", '<math style="padding: 0.6em 0"', 1))
    raise nodes.SkipNode


def _insert_figures(_app: Any, _page: str, source: list[str]) -> None:
    marker = "<!-- figures of the ladder -->"
    if marker in source[0]:
        found = "\n\n".join(_figures(file) for file in sorted(RESULTS.glob("*/ladder.json")))
        source[0] = source[0].replace(marker, found or "*No GPU has run this ladder yet, so there are no figures.*")


def _figures(file: Path) -> str:
    """A row a rung and a column a dim: microseconds, and frac. Below it the roofline, where there is one."""
    result = json.loads(file.read_text(encoding="utf-8"))
    cells = {(one["rung"], one["dtype"], one["dim"]): one for one in result["ladder"]}
    dims = sorted({dim for *_, dim in cells})
    lines = [f"{result['title']}\n", "| µs (frac) | dtype | " + " | ".join(map(str, dims)) + " |"]
    lines.append("|---|---|" + "---:|" * len(dims))
    for rung, dtype in dict.fromkeys(key[:2] for key in cells):
        found = [cells.get((rung, dtype, dim)) for dim in dims]
        texts = [f"{1e6 * one['seconds']:.1f}&nbsp;({one['frac']:.2f})" if one else "–" for one in found]
        lines.append(f"| {rung} | {dtype} | " + " | ".join(texts) + " |")
    if (file.parent / "roofline.png").exists():
        lines.append(f"\n![Roofline](../benchmarks/results/{file.parent.name}/roofline.png)")
    return "\n".join(lines)
