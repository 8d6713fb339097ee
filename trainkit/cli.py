"""argv -> verb -> exit code. `trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES`.

The first plain word is the verb, wherever flags are; the default verb is `train`. `key=value` is always config. Errors
are printed to standard error on one screen, without a traceback, unless they are a defect of trainkit or of the user's
own code.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from trainkit import __version__
from trainkit.config.door import called_from
from trainkit.config.grammar import COMMAND_LINE, is_override
from trainkit.config.values import path_rule
from trainkit.errors import ConfigError, Problem, TrainkitError
from trainkit.redaction import knows_secrets, masked_output
from trainkit.verbs.support.call import MODULES, PATHS, VERBS, Call, Flag

_GLOBAL: Final[Mapping[str, Flag]] = {
    "help": Flag(help="show this, or the help of the verb"),
    "version": Flag(help="show the version"),
    "multirun": Flag(help="train: run every combination of comma lists, a=1,2 b=x,y"),
    "config-dir": Flag(help="a folder of your own YAML files, GROUP/CHOICE.yaml; it is searched first", value="DIR"),
    "allow-package": Flag(help="trust this package: _target_ may name its classes and functions", value="PKG"),
    "cfg": Flag(help="print the composed config and stop: job, hydra or all", value="WHICH"),
    "shell-completion": Flag(help='install completion: eval "$(trainkit -sc install=bash)"', value="install=SHELL"),
}
_SHORT: Final = {
    "-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir", "-sc": "--shell-completion",
    "-V": "--version", "-cn": "--config-name", "-cp": "--config-path", "-p": "--package", "-r": "--run", "-i": "--info",
}  # fmt: skip
_REFUSED: Final = {
    "config-name": "there is only one primary config. A recipe describes a whole training: recipe=NAME.",
    "config-path": "your own folder of YAMLs comes first on the search path: --config-dir DIR.",
    "run": "without a flag, trainkit runs.",
    "info": "trainkit explain KEY shows the origin of a value; trainkit ls lists the choices.",
    "hydra-help": "Hydra's own settings are keys, hydra.run.dir=DIR; --cfg hydra shows them.",
    "package": "trainkit explain KEY shows a part of the config.",
    "resolve": "--cfg already shows the resolved config.",
    "experimental-rerun": "trainkit resume RUN continues a run.",
}
_REPEATABLE: Final = ("config-dir", "allow-package")
"""Flags whose values accumulate."""
_SHOWN_PROBLEMS: Final = 30
_SHOWN_LINES: Final = 31


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    with masked_output(), called_from("command line"):
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            _print_error("")


def main_of_process() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    code = main()
    if "trainkit.run.rendezvous.join" in sys.modules:  # this process was one of several ranks
        from trainkit.run.signals import exit_without_teardown  # noqa: PLC0415 - only for a rank

        exit_without_teardown(code)
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    # A console script does not import from the current folder, where the user's own package may be. Append it, so that
    # no file of the user hides a module of Python.
    if os.getcwd() not in sys.path and "" not in sys.path:  # noqa: PTH109 - pathlib is slower to ask
        sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        return _dispatch(arguments)
    except TrainkitError as error:
        _print_error(_told(error))
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("stopped\n")
        return 130
    except BrokenPipeError:
        # The reader, for example `head`, has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from trainkit.storage import as_storage_error  # noqa: PLC0415 - for an error only

        full = as_storage_error(error, Path("outputs"))
        if full is not None:
            _print_error(_told(full))
            return full.exit_code
        if not knows_secrets():
            raise
        _print_error(traceback.format_exc())  # as Python prints it, but with secrets masked
        return 1


def _print_error(text: str) -> None:
    """Print to standard error and flush; a closed terminal does not change the exit code."""
    for stream, content in ((sys.stdout, ""), (sys.stderr, text)):
        try:
            stream.write(content)
            stream.flush()
        except OSError:
            from trainkit.report.train_log import silence  # noqa: PLC0415 - where it happened only

            silence(stream)


def parse(arguments: Sequence[str]) -> tuple[Call, dict[str, str]]:
    """Parse a command line.

    Returns:
        The call, and the flags that belong to no verb: help, version, cfg, shell-completion.

    Raises:
        ConfigError: every flag that is unknown or lacks its value.

    Example:
        >>> call, _ = parse(["-m", "train", "optimizer.lr=1,2"])
        >>> call.verb, call.multirun, call.overrides
        ('train', True, ('optimizer.lr=1,2',))
    """
    verb, rest = _verb_of(arguments)
    known = {**_GLOBAL, **(_flags_of(verb) if verb in VERBS else {})}
    found: dict[str, list[str]] = {}
    bare: list[str] = []
    overrides, problems = [], []
    words = iter(rest)
    for word in words:
        if word == "--":
            bare += words
        elif word.startswith("-") and len(word) > 1:
            problems += _take_flag(word, words, known, found)
        elif is_override(word) and not (len(bare) < PATHS.get(verb, 0) and os.path.lexists(word)):
            overrides.append(word)
        else:
            literal = str(Path(word)).startswith("~") and os.path.lexists(word)  # no user's home
            bare.append(str(Path(word).absolute()) if literal else word)
    problems += [*_repeated_flags(found, known), *_unusable_paths([*bare, *found.get("config-dir", ())])]
    if verb not in VERBS and not problems:
        problems.append(Problem(key=verb, rule=_no_verb(verb), origin="command line"))
    if "multirun" in found and verb != "train":
        rule = f"belongs to train. {verb} compares the choices of a comma list without it."
        problems.append(Problem(key="-m", rule=rule, origin="command line"))
    if problems:
        raise ConfigError(problems)
    own = {name: values[-1] for name, values in found.items() if name not in _GLOBAL}
    call = Call(
        verb=verb,
        arguments=tuple(bare),
        flags=own,
        overrides=tuple(overrides),
        config_dirs=tuple(Path(folder).expanduser().absolute() for folder in found.get("config-dir", ())),
        packages=tuple(name for text in found.get("allow-package", ()) for name in text.split(",")),
        multirun="multirun" in found,
    )
    return call, {name: values[-1] for name, values in found.items() if name in _GLOBAL}


def _verb_of(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the first plain word, and all other words; the value of a flag is no plain word.

    The flags before the verb may be its own: a verb is the first plain word if all words before it are its flags, their
    values and overrides.
    """
    for place, word in enumerate(arguments):
        if word in VERBS:
            known = {**_GLOBAL, **_flags_of(word)}
            flags = [_SHORT.get(one, one)[2:].partition("=")[0] for one in arguments[:place] if one.startswith("-")]
            if _first_plain(arguments, known) == place and known.keys() >= {*flags}:
                return word, _without(arguments, place)
    first = _first_plain(arguments, _GLOBAL)
    return ("train", list(arguments)) if first is None else (arguments[first], _without(arguments, first))


def _without(arguments: Sequence[str], place: int) -> list[str]:
    return [*arguments[:place], *arguments[place + 1 :]]


def _flags_of(verb: str) -> Mapping[str, Flag]:
    flags: Mapping[str, Flag] = import_module(MODULES[verb]).FLAGS
    return flags


def _first_plain(arguments: Sequence[str], known: Mapping[str, Flag]) -> int | None:
    """Return the place of the first word that is no flag, no value of a flag and no override."""
    takes_value = {f"--{name}" for name, flag in known.items() if flag.value}
    skip = False
    for place, word in enumerate(arguments):
        if skip:
            skip = False
        elif word.startswith("-") and len(word) > 1:
            skip = _SHORT.get(word, word) in takes_value
        elif not is_override(word):
            return place
    return None


def _take_flag(word: str, words: Any, known: Mapping[str, Flag], found: dict[str, list[str]]) -> list[Problem]:
    """Read one flag with its value; return its problems."""
    full = _SHORT.get(word, word)
    name, has_value, value = full.removeprefix("--").partition("=")
    if name in _REFUSED:
        return [Problem(key=word, rule=f"is Hydra's, and not needed here: {_REFUSED[name]}", origin="command line")]
    if name not in known or not full.startswith("--"):
        return [Problem(key=word, rule=_no_flag(name, known), origin="command line")]
    if known[name].value is None:
        if has_value:
            return [Problem(key=word, rule=f"--{name} takes no value.", origin="command line")]
        found.setdefault(name, []).append("")
        return []
    value = value if has_value else next(words, "")
    if not value:
        rule = f"needs a value: --{name} {known[name].value}."
        return [Problem(key=word, rule=rule, origin="command line")]
    found.setdefault(name, []).append(value)
    return []


def _no_flag(name: str, known: Mapping[str, Flag]) -> str:
    from trainkit.config.values import closest  # noqa: PLC0415 - for a message only

    near = closest(name, known)
    return "no such flag." + (f" Did you mean --{near}?" if near else " trainkit --help shows them.")


def _no_verb(word: str) -> str:
    from trainkit.config.values import closest  # noqa: PLC0415 - for a message only

    near = closest(word, VERBS)
    return "no such verb." + (f" Did you mean {near}?" if near else f" There are: {', '.join(VERBS)}.")


def _dispatch(arguments: Sequence[str]) -> int:
    # Answer help and version before anything else is checked.
    early = [_SHORT.get(word, word) for word in arguments]
    if "--version" in early:
        sys.stdout.write(f"trainkit {__version__}\n")
        return 0
    if "--help" in early:
        verb, _ = _verb_of([word for word in arguments if _SHORT.get(word, word) != "--help"])
        named = any(word == verb for word in arguments)
        sys.stdout.write(_verb_help(verb) if named and verb in VERBS else _help())
        return 0
    call, flags = parse(arguments)
    if "shell-completion" in flags:
        from trainkit.verbs.starting.completion import answer  # noqa: PLC0415 - for a shell only

        return answer(flags["shell-completion"], call)
    if "cfg" in flags:
        return _show(call, flags["cfg"])
    from trainkit.config.targets.allowed import allow_packages  # noqa: PLC0415 - help and completion need none
    from trainkit.config.yaml_files import with_config_dirs  # noqa: PLC0415 - the same

    with allow_packages(call.packages), with_config_dirs(call.config_dirs):
        try:
            code: int = import_module(MODULES[call.verb]).run(call)
        except SystemExit as error:  # of the user's code: Python would end with its code, often 0
            from trainkit.run.session.outcome import unless_exit  # noqa: PLC0415 - for an error only

            raise unless_exit(error, None, None) from error
    return code


def _show(call: Call, which: str) -> int:
    from trainkit.api import compose  # noqa: PLC0415 - for --cfg only
    from trainkit.config.compose.jobs import show  # noqa: PLC0415

    if which not in ("job", "hydra", "all"):
        raise ConfigError([Problem(key="--cfg", value=which, rule="must be job, hydra or all.", origin="command line")])
    if call.arguments:
        rule = f"prints what key=value compose, and not {call.arguments[0]}. The config of a run is RUN/resolved.yaml."
        raise ConfigError([Problem(key="--cfg", rule=rule, origin=COMMAND_LINE)])
    show(compose(call.overrides, config_dirs=call.config_dirs, packages=call.packages), which)
    return 0


def _told(error: TrainkitError) -> str:
    """Return the printed text of an error: its message on one screen; on a terminal also a link to its explanation."""
    text = f"{_one_screen(error)}\n"
    if not sys.stderr.isatty():
        return text
    from trainkit.report.error_address import address_line  # noqa: PLC0415 - for an error only

    return f"{text}{address_line(error)}\n"


def _one_screen(error: TrainkitError) -> str:
    """Return a message that fits on a screen: the first problems of a config, start and end of other errors."""
    if not isinstance(error, ConfigError):
        from trainkit.report.tracebacks import one_screen  # noqa: PLC0415 - for an error only

        return one_screen(str(error), _SHOWN_LINES)
    lines = str(error).splitlines()
    more = len(lines) - _SHOWN_PROBLEMS - 1
    return "\n".join([*lines[: _SHOWN_PROBLEMS + 1], f"  and {more} more"] if more > 0 else lines)


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = [f"  {name:<{width}}  {text}" for name, text in VERBS.items()]
    return "\n".join(
        [
            "usage: trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES",
            "",
            "One config, the same training anywhere. Without a verb it trains; without arguments, on the digits.",
            "",
            "  trainkit                                       train an MLP on digits",
            "  trainkit strategy=mirrored                     the same training on every device",
            "  trainkit recipe=null model=mlp epochs=3 optimizer.lr=0.003",
            "  trainkit -m optimizer.lr=0.01,0.003            train with both, and rank the runs",
            "",
            "verbs:",
            *verbs,
            "",
            "flags:",
            *_flag_lines(_GLOBAL),
            "",
            "overrides: group=choice selects a YAML file (trainkit ls), key=value sets a value (trainkit explain KEY),",
            "~key removes a key. Quote a value with spaces or special characters: 'data.path=\"~/my data\"'.",
            "",
        ]
    )


def _verb_help(verb: str) -> str:
    module = import_module(MODULES[verb])
    flags = _flag_lines(module.FLAGS)
    parts = [f"usage: trainkit {verb} {module.USAGE}", "", VERBS[verb]]
    return "\n".join([*parts, *(["", "flags:", *flags] if flags else []), ""])


def _flag_lines(flags: Mapping[str, Flag]) -> list[str]:
    short = {full: brief for brief, full in _SHORT.items()}
    names = []
    for name, flag in flags.items():
        brief = f"{short[f'--{name}']}, " if f"--{name}" in short else ""
        names.append(f"{brief}--{name}" + (f" {flag.value}" if flag.value else ""))
    width = max(map(len, names), default=0)
    return [f"  {name:<{width}}  {flag.help}" for name, flag in zip(names, flags.values(), strict=True)]


def _repeated_flags(found: Mapping[str, Sequence[str]], known: Mapping[str, Flag]) -> Iterator[Problem]:
    """Yield a problem for each flag with one value that is given several times."""
    for name, values in found.items():
        if len(values) > 1 and known[name].value is not None and name not in _REPEATABLE:
            rule = f"is given twice: {values[0]} and {values[1]}. Give it once."
            yield Problem(key=f"--{name}", rule=rule, origin=COMMAND_LINE)


def _unusable_paths(paths: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each word that no file system accepts as a path."""
    for path in paths:
        if rule := path_rule(path):
            yield Problem(key=path, rule=rule, origin=COMMAND_LINE)
