"""argv -> verb -> exit code. `trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES`.

The first plain word is the verb, wherever flags are; the default verb is `train`. `key=value` is always config. Errors
are printed to standard error on one screen, without a traceback, unless they are a defect of trainkit or of the user's
own code.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from trainkit import __version__
from trainkit.config.grammar import refusal
from trainkit.config.interface import called_from
from trainkit.errors import ConfigError, TrainkitError
from trainkit.redaction import masked_output
from trainkit.verbs.support.call import Call, module_of, parse, parser_of, verb_of
from trainkit.verbs.support.table import VERBS

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
    from trainkit.run.fork_server_main import run_command  # noqa: PLC0415 - what imports this module may need no process

    code = run_command(main)
    if "torch" in sys.modules:
        from trainkit.run.signals import exit_as_interpreter, exit_without_teardown  # noqa: PLC0415 - imported by now

        was_rank = "trainkit.run.rendezvous.join" in sys.modules  # one of several: threads of torch may hang
        leave = exit_without_teardown if was_rank else exit_as_interpreter
        leave(code)
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    # A console script does not import from the current folder, where the user's own package may be. Append it, so that
    # no file of the user hides a module of Python.
    if os.getcwd() not in sys.path and "" not in sys.path:  # noqa: PTH109 - pathlib is slower to ask
        sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        return _dispatch(arguments)
    except TrainkitError as error:
        if "--json" in arguments:
            from trainkit.report.error_address import error_document  # noqa: PLC0415 - for an error only
            from trainkit.report.json_output import print_json  # noqa: PLC0415

            print_json(error_document(error))
        _print_error(_error_text(error))
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("stopped\n")
        return 130
    except BrokenPipeError:
        # The reader, for example `head`, has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - a defect, or of the user's code: its traceback is printed
        from trainkit.files import as_storage_error  # noqa: PLC0415 - for an error only

        full = as_storage_error(error, Path("outputs"))
        if full is not None:
            _print_error(_error_text(full))
            return full.exit_code
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


def _dispatch(arguments: Sequence[str]) -> int:
    # Answer help and version before anything else is checked.
    aliases = {"-h": "--help", "-V": "--version"}
    early = [aliases.get(word, word) for word in arguments]
    if "--version" in early:
        sys.stdout.write(f"trainkit {__version__}\n")
        return 0
    if "--help" in early:
        verb, _ = verb_of([word for word in early if word != "--help"])
        sys.stdout.write(parser_of(verb)[0].format_help())
        return 0
    call, flags = parse(arguments)
    if "shell-completion" in flags:
        from trainkit.verbs.starting.completion import answer  # noqa: PLC0415 - for a shell only

        return answer(flags["shell-completion"], call)
    if "cfg" in flags:
        return _show(call, flags["cfg"])
    from trainkit.config.targets.allowed import allow_packages, importable  # noqa: PLC0415 - help and completion need none
    from trainkit.config.yaml_files import with_config_dirs  # noqa: PLC0415 - the same

    if call.project is not None:
        sys.stderr.write(f"project {call.project} (--no-project leaves it out)\n")
    code_of_project = importable(call.project.code if call.project else ())
    with code_of_project, allow_packages(call.packages), with_config_dirs(call.config_dirs):
        # A wrong key is refused before the verb imports classes, together with the rules that its flags break.
        spec = VERBS[call.verb]
        if spec.composes and call.verb != "train" and (problems := call.key_problems()):
            raise ConfigError([*(module_of(call.verb).problems(call) if spec.combines else ()), *problems])
        try:
            code: int = module_of(call.verb).run(call)
        except SystemExit as error:  # of the user's code: Python would end with its code, often 0
            from trainkit.run.task import unless_exit  # noqa: PLC0415 - for an error only

            raise unless_exit(error, None, None) from error
    return code


def _show(call: Call, which: str) -> int:
    from trainkit.api import compose  # noqa: PLC0415 - for --cfg only
    from trainkit.config.compose.jobs import show  # noqa: PLC0415

    if call.arguments:
        rule = f"prints what key=value compose, and not {call.arguments[0]}. The config of a run is RUN/resolved.yaml."
        raise refusal("--cfg", rule)
    show(compose(call.overrides, config_dirs=call.config_dirs, packages=call.packages), which)
    return 0


def _error_text(error: TrainkitError) -> str:
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
