"""The command line: `fusionlab doctor | demo | trace | find | explain | diff | export | compare | bench | tune | plans`, each
with `--json`.

Results go to standard output, progress to standard error. Exit status: 0 done, 1 an error (one line on standard error),
2 wrong usage, 3 a newer record that is worse than the older one (`diff`), 130 interrupted with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .commands.loading import example_arguments, keyword_arguments, load_function
from .errors import FusionLabError, did_you_mean
from .output import check_file, output_folder
from .progress import Stages, watched

_FUNCTION = """\
FUNCTION is package.module:function or path/to/file.py:function.

Its example arguments are, in this order:
  --args EXPR         a Python expression, evaluated in the module with jax, jnp and np: a tuple of arguments, or one
                      argument; f32[64,128], bf16[8,4], i32[8] mean arrays (commands that run it draw random data)
  function.example_args   an attribute of the function
  example_args        an attribute of the module; may be a dict from function name
Each attribute is a tuple of arguments, or a function of no arguments that returns one.
--kwargs EXPR, a dict, gives keyword arguments. Arguments that are Python values rather than arrays are named in
--static-argnums (positions) and --static-argnames, as for jax.jit.

examples:
  fusionlab find fusionlab.models.mlp:apply --args "(init(jax.random.key(0)), jnp.ones((8, 64)))"
  fusionlab find model.py:attend --args "f32[2,64,4,16], f32[2,64,4,16], f32[2,64,4,16]"
"""
_DEVICE = (
    "decide for this device: cpu, an architecture such as sm_90, or a100, l4, h100, h200, b200, rtx4090, rtx5090, t4"
)
INTERRUPTED = 130  # as a shell says of a program that Ctrl-C ended: 128 + SIGINT
_LONG = "demo", "compare", "bench", "tune"  # say what they do where standard error is no terminal, too
WORSE = 3  # the exit status of `diff` of two records


class _Parser(argparse.ArgumentParser):
    """argparse's parser, with error messages on one line."""

    def error(self, message: str) -> NoReturn:
        near = self._nearest(message)
        self.exit(2, f"fusionlab: error: {message}{near and '.'}{near} (see {self.prog} --help)\n")

    def _nearest(self, message: str) -> str:
        """The command or option that was probably meant, if argparse rejected a name."""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            return did_you_mean(found[1], re.findall(r"[\w.-]+", found[2]))
        if found := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            groups = [self, *(p for a in self._actions if isinstance(a.choices, dict) for p in a.choices.values())]
            names = {name for group in groups for name in group._option_string_actions}
            return did_you_mean(found[1], names) if found[1] not in names else ""  # another command's
        return ""


class _Version(argparse.Action):
    """Prints the version, which is only read when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from . import __version__

        print(f"fusionlab {__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parser().parse_args(argv)
    status = 0
    try:
        with contextlib.ExitStack() as options.shown:
            options.progress = options.shown.enter_context(watched(True if options.command in _LONG else None))
            status = options.run(options) or 0
        sys.stdout.flush()
    except FusionLabError as e:
        print(f"fusionlab: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fusionlab: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe left (`fusionlab trace ... | head`): no error, but Python would complain when flushing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fusionlab", description="Shows where a JAX model could run fused, and proves it.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="report what this machine has and can run, and the command to run next")
    doctor.add_argument("--measure", action="store_true", help="also measure copy bandwidth and product rate (seconds)")
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="find, fuse, verify and time a transformer block; write a report")
    demo.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for the report and its pictures")
    demo.add_argument("--size", type=_positive, default=2048, metavar="S", help="sequence length (default %(default)s)")
    demo.set_defaults(run=_demo)

    trace = _function_command(commands, "trace", "print the traced program")
    trace.set_defaults(run=_trace)

    find = _function_command(commands, "find", "list what can be fused, what was declined, and why")
    _add_pass_options(find)
    find.add_argument("--device", metavar="NAME", help=_DEVICE)
    find.add_argument("--dump", metavar="DIR", help="write the graph before and after each pass, and report.json")
    find.set_defaults(run=_find)

    explain = _function_command(commands, "explain", "print what was found about one node or site")
    explain.add_argument(
        "name", metavar="NAME", help="a node ('%%12', as trace prints it) or a site's id (as find prints it)"
    )
    _add_pass_options(explain)
    explain.add_argument("--device", metavar="NAME", help=_DEVICE)
    explain.add_argument("--origin", action="store_true", help="print which line of FusionLab declined a site")
    explain.set_defaults(run=_explain)

    diff = _function_command(
        commands,
        "diff",
        "show the program before and after fusing; or list what got worse between two records (exit status 3)",
    )
    diff.add_argument(
        "newer", nargs="?", metavar="NEW.json", help="a record; FUNCTION is then the older record, OLD.json"
    )
    diff.add_argument(
        "-o", "--output", metavar="FILE", help="of two records: also write a page (.html), .csv, .json or .txt"
    )
    _add_pass_options(diff)
    diff.set_defaults(run=_diff)

    export = _function_command(commands, "export", "write the graph as a file: .svg .dot .html .json .txt .png .pdf")
    _add_pass_options(export)
    export.add_argument(
        "--fused", action="store_true", help="write the fused program (default: the original, with its sites)"
    )
    export.add_argument("-o", "--output", required=True, metavar="FILE", help="output file; its suffix sets the format")
    export.set_defaults(run=_export)

    compare = _function_command(commands, "compare", "measure time and errors before and after fusing")
    _add_pass_options(compare)
    compare.add_argument("--no-grad", action="store_true", help="measure the call only, without its gradient")
    _add_effort_options(compare)
    compare.add_argument("-o", "--output", metavar="FILE", help="write it as a web page (.html) or a record (.json)")
    compare.set_defaults(run=_compare)

    bench = _function_command(commands, "bench", "measure time alone before and after fusing")
    _add_pass_options(bench)
    bench.add_argument("--no-grad", action="store_true", help="measure the call only, without its gradient")
    _add_effort_options(bench)
    bench.add_argument("-o", "--output", metavar="FILE.json", help="write the record with every sample")
    bench.set_defaults(run=_bench)

    tune = _function_command(commands, "tune", "measure which implementations are fastest here; write the plan file")
    _add_pass_options(tune)
    tune.add_argument("--no-grad", action="store_true", help="measure the call only, without its gradient")
    tune.add_argument("-o", "--output", metavar="FILE", help="the plan file (default: where fusing looks)")
    tune.add_argument("--budget", type=float, metavar="S", help="seconds for all of it (default: no limit)")
    tune.add_argument("--again", action="store_true", help="also measure what the plan file has for this machine")
    tune.set_defaults(run=_tune)

    plans = commands.add_parser("plans", help="list the measurements in plan files; with -o, join the files")
    plans.add_argument("files", nargs="+", metavar="FILE", help="plan files, as tune writes them")
    plans.add_argument("-o", "--output", metavar="FILE", help="the plan file that all of them are added to")
    plans.set_defaults(run=_plans)

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _function_command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=summary, epilog=_FUNCTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("function", metavar="FUNCTION", help="module:function or file.py:function")
    command.add_argument("--args", metavar="EXPR", help="example arguments, as a Python expression")
    command.add_argument("--kwargs", metavar="EXPR", help="keyword arguments, as a Python expression for a dict")
    command.add_argument(
        "--static-argnums", type=_numbers, metavar="I,J", help="positions of arguments that are not arrays"
    )
    command.add_argument("--static-argnames", type=_names, metavar="A,B", help="names of arguments that are not arrays")
    return command


def _add_effort_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--samples", type=_positive, default=40, metavar="N", help="samples of each version (default %(default)s)"
    )
    command.add_argument(
        "--budget", type=_positive, default=60, metavar="S", help="seconds of timing (default %(default)s)"
    )


def _add_pass_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--passes", type=_names, metavar="A,B", help="run only these passes (default: all)")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, needed whole numbers, as in 0,2") from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, needed a whole number above 0")
    return int(text)


def _print(options: argparse.Namespace, text: Any, data: dict[str, Any]) -> None:
    options.shown.close()  # the line with what is being done, which would stand in between
    print(json.dumps(data, indent=2) if options.json else text)


def _doctor(options: argparse.Namespace) -> None:
    from .commands.doctor import doctor

    found = doctor(measure=options.measure)
    _print(options, found, found.to_dict())


def _demo(options: argparse.Namespace) -> None:
    from .commands.demo import run_demo

    result = run_demo(options.output, size=options.size, progress=options.progress)
    _print(options, result, result.to_dict())


def _load(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """The function, its arguments, its keyword arguments, and which of them are static."""
    Stages(options.progress)(f"loading {options.function}")
    function, module = load_function(options.function)
    static = {k: tuple(v) for k in ("static_argnums", "static_argnames") if (v := getattr(options, k)) is not None}
    return (
        function,
        example_arguments(function, module, options.args),
        keyword_arguments(module, options.kwargs),
        static,
    )


def _trace(options: argparse.Namespace) -> None:
    import fusionlab as fl

    from .viz.export import view_model

    function, args, kwargs, static = _load(options)
    Stages(options.progress)("tracing")
    graph = fl.trace(function, *args, **static, **kwargs)
    options.shown.close()
    print(json.dumps(view_model(graph), indent=2) if options.json else graph)


def _find(options: argparse.Namespace) -> None:
    import fusionlab as fl

    function, args, kwargs, static = _load(options)
    asked = {"passes": options.passes, "device": options.device, "progress": options.progress}
    with output_folder(options.dump) if options.dump else contextlib.nullcontext() as work:
        found = fl.find(function, *args, **asked, dump=work, **static, **kwargs)
    _print(options, found.report(), found.to_dict())


def _explain(options: argparse.Namespace) -> None:
    import fusionlab as fl

    function, args, kwargs, static = _load(options)
    asked = {"passes": options.passes, "device": options.device, "progress": options.progress}
    found = fl.find(function, *args, **asked, **static, **kwargs)
    text = found.explain(options.name, origin=options.origin)
    _print(options, text, {"name": options.name, "text": text})


def _diff(options: argparse.Namespace) -> int:
    return _diff_records(options) if options.newer else _diff_programs(options)


def _diff_records(options: argparse.Namespace) -> int:
    import fusionlab as fl

    if options.output:
        check_file(options.output, None)
    found = fl.diff(options.function, options.newer)
    if options.output:
        found.save(options.output)
    _print(options, found, found.to_dict())
    return WORSE if found.regressions else 0


def _diff_programs(options: argparse.Namespace) -> int:
    import difflib

    import fusionlab as fl

    from .graph.program.text import graph_text

    function, args, kwargs, static = _load(options)
    found = fl.find(function, *args, passes=options.passes, progress=options.progress, **static, **kwargs)
    before, after = (graph_text(graph).splitlines() for graph in (found.graph, found.apply()))
    text = "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm=""))
    _print(options, text or "nothing is fused", {"diff": text, "counts": found.counts()})
    return 0


def _export(options: argparse.Namespace) -> None:
    import fusionlab as fl

    from .viz.explorer.files import save

    check_file(options.output, None)
    function, args, kwargs, static = _load(options)
    found = fl.find(function, *args, passes=options.passes, progress=options.progress, **static, **kwargs)
    graph, findings = (found.apply(), None) if options.fused else (found.graph, found)
    Stages(options.progress)(f"writing {options.output}")
    path = save(graph, options.output, findings)
    _print(options, f"written to {path}", {"path": str(path)})


def _compare(options: argparse.Namespace) -> None:
    import fusionlab as fl

    record = str(options.output or "").endswith(".json")
    if options.output:
        check_file(options.output, ".json" if record else ".html")
    function, args, kwargs, static = _load_with_data(options)
    fused = fl.fuse(function, passes=options.passes, **static)
    result = fl.compare(function, fused, *args, grad=_grad(options), **_effort(options), **kwargs)
    if options.output:
        (result.save if record else result.to_html)(options.output)
    _print(options, result, result.to_dict())


def _effort(options: argparse.Namespace) -> dict[str, Any]:
    return {"samples": options.samples, "budget_s": options.budget, "progress": options.progress}


def _grad(options: argparse.Namespace) -> bool | None:
    """Whether to take gradients: where there is something to differentiate, unless switched off."""
    return False if options.no_grad else None


def _load_with_data(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """`_load`, with random arrays for arguments of which only shapes are given."""
    from .commands.loading import with_data

    function, args, kwargs, static = _load(options)
    return function, *with_data((args, kwargs)), static


def _bench(options: argparse.Namespace) -> None:
    import fusionlab as fl

    if options.output:
        check_file(options.output, ".json")
    function, args, kwargs, static = _load_with_data(options)
    fused = fl.fuse(function, passes=options.passes, **static)
    only = {"grad": _grad(options), "numerics": False, "memory": False}
    result = fl.compare(function, fused, *args, **only, **_effort(options), **kwargs)
    if options.output:
        result.save(options.output)
    _print(options, result, result.to_dict())


def _tune(options: argparse.Namespace) -> None:
    import fusionlab as fl

    function, args, kwargs, static = _load(options)
    asked = {"passes": options.passes, "grad": not options.no_grad, "path": options.output}
    asked |= {"budget_s": options.budget, "again": options.again}
    result = fl.tune(function, *args, **asked, progress=options.progress, **static, **kwargs)
    _print(options, result, result.to_dict())


def _plans(options: argparse.Namespace) -> None:
    from .commands.plans import plans

    found = plans(options.files, options.output)
    _print(options, found, found.to_dict())


if __name__ == "__main__":
    sys.exit(main())
