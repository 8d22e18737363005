"""Runs every code block of the pages, and of the README: `python docs/examples.py`.

python     is executed, page by page in one namespace; with >>> it must print what it says
console    what follows each `$ command` must be what the command prints; --write puts that there
cpp        is an excerpt: it must stand in the file that its title names

A block under <!-- needs a GPU --> runs where there is one; what its commands print is not compared: they measure.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from ndsoftmax.__main__ import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"^(?P<gpu><!-- needs a GPU -->\n)?"
    r"```(?P<language>python|console|cpp)(?: title=\"(?P<title>.*?)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def wrong(page: Path) -> Iterator[str]:
    """Run a page; yield what is not as it says."""
    names: dict[str, object] = {}
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["gpu"] and not torch.cuda.is_available():
            continue
        where = f"{page.name}, {block['language']}: {block['body'].splitlines()[0]}"
        if block["language"] == "cpp":
            if block["body"] not in (ROOT / block["title"]).read_text(encoding="utf-8"):
                yield f"{where}\nstands no longer in {block['title']}"
        elif block["language"] == "console":
            if (now := _session(block["body"])) != block["body"] and not block["gpu"]:
                yield f"{where}\nnow prints\n{now}"
        elif ">>>" in block["body"]:
            test = doctest.DocTestParser().get_doctest(block["body"], names, where, str(page), 0)
            said: list[str] = []
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=False)
            names.update(test.globs)
            if said:
                yield "".join(said)
        else:
            exec(compile(block["body"], where, "exec"), names)


def write(page: Path) -> None:
    """Put in what the commands of a page print."""
    text = page.read_text(encoding="utf-8")

    def printed(block: re.Match[str]) -> str:
        if block["language"] != "console" or block["gpu"]:
            return block[0]
        return block[0].replace(block["body"], _session(block["body"]))

    page.write_text(_BLOCK.sub(printed, text), encoding="utf-8")


def _session(body: str) -> str:
    """The commands of a console, each with what it prints."""
    commands = [line for line in body.splitlines() if line.startswith("$ ")]
    return "".join(f"{command}\n{_output(command[2:])}" for command in commands)


def _output(command: str) -> str:
    program, *arguments = command.split()
    if program != "ndsoftmax":
        raise ValueError(f"a page may run ndsoftmax alone, not {program}")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main(arguments)
    return output.getvalue()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for page in PAGES:
            write(page)
    found = [text for page in PAGES for text in wrong(page)]
    print("\n".join(found))
    sys.exit(bool(found))
