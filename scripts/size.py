"""Hold the size of each room of the code below its ceiling, and print what a change adds and removes.

    python scripts/size.py            compare with scripts/sizes.toml and with main; exit code 1 above a ceiling
    python scripts/size.py --write    write the sizes of now as ceilings

A line counts if it holds code: no docstring, comment or blank line; imports count. Tokens are counted on the same
lines, so that longer lines do not hide code.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = ROOT / "scripts/sizes.toml"
TREES: Final = ("trainkit", "hydra_plugins", "tests")
_LAYOUT: Final = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


@cache  # most of the files are those of main
def measure(source: str) -> tuple[int, int]:
    """Return the lines of a module that hold code, and their tokens."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines, tokens = set[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and not (token.type == tokenize.STRING and token.start[0] in texts):
            lines.update(range(token.start[0], token.end[0] + 1))
            tokens += 1
    return len(lines), tokens


def room_of(path: str) -> str:
    """Return the room of a file: a folder of trainkit, its modules at the top, or another tree.

    Example:
        >>> room_of("trainkit/run/begin.py"), room_of("trainkit/cli.py"), room_of("tests/run/test_x.py")
        ('trainkit/run', 'trainkit', 'tests')
    """
    tree, *folders = Path(path).parent.parts
    return f"{tree}/{folders[0]}" if tree == "trainkit" and folders else tree


def sizes_of(sources: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Return code lines and tokens of each room."""
    lines, tokens = Counter[str](), Counter[str]()
    for path, source in sources.items():
        size = measure(source)
        lines[room_of(path)] += size[0]
        tokens[room_of(path)] += size[1]
    return {room: (lines[room], tokens[room]) for room in sorted(lines)}


def sources_here() -> dict[str, str]:
    """Return the modules of this checkout."""
    files = [path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def sources_of(commit: str) -> dict[str, str]:
    """Return the modules of a commit; none where git does not know it."""
    done = subprocess.run(["git", "archive", commit, *TREES], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        return {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        members = [member for member in archive if member.isfile() and member.name.endswith(".py")]
        files = {member.name: archive.extractfile(member) for member in members}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def rows(sizes: dict[str, tuple[int, int]], ceilings: dict[str, list[int]]) -> list[str]:
    """Return a line for each room above its ceiling, or without one."""
    above = []
    for room, (lines, tokens) in sizes.items():
        most = ceilings.get(room)
        if most is None:
            above.append(f"{room}: has no ceiling in {TABLE.name}; it has {lines:,} lines and {tokens:,} tokens")
        elif lines > most[0] or tokens > most[1]:
            above.append(f"{room}: {lines:,} lines of {most[0]:,}, {tokens:,} tokens of {most[1]:,}")
    return above


def main() -> int:
    """Print the changes against main, and check the ceilings."""
    sizes = sizes_of(sources_here())
    if "--write" in sys.argv:
        table = "".join(f'"{room}" = [{lines}, {tokens}]\n' for room, (lines, tokens) in sizes.items())
        TABLE.write_text(f"# Room = [most code lines, most tokens]: scripts/size.py\n{table}", encoding="utf-8")
    before = sizes_of(sources_of("main"))
    for room in sorted({*sizes, *before}):
        (lines, tokens), (lines_before, tokens_before) = sizes.get(room, (0, 0)), before.get(room, (0, 0))
        if before and (lines, tokens) != (lines_before, tokens_before):
            sys.stdout.write(f"{lines - lines_before:+7,} lines {tokens - tokens_before:+8,} tokens  {room}\n")
    above = rows(sizes, tomllib.loads(TABLE.read_text(encoding="utf-8")))
    library = [lines for room, (lines, _) in sizes.items() if room != "tests"]
    sys.stdout.write(f"{sum(library):7,} lines of the library, {sizes['tests'][0]:,} of the tests\n")
    sys.stdout.writelines(f"above its ceiling: {row}\n" for row in above)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
