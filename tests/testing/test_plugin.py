"""The pytest plugin, run by pytest: fixture, marker, options, reports, snapshots, summary, with and without pytest-xdist."""

import os
import re
import textwrap
import tomllib
from pathlib import Path

import jax.numpy  # noqa: F401
import pytest

import fusionlab.testing.fixture
import fusionlab.testing.snapshots
from fusionlab.testing.snapshots import file_name, snapshot_path

# pytester forgets the modules that a run inside this process imports; those above are there before.
ROOT = Path(fusionlab.__file__).parents[1]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")

MODEL = """
import jax
import jax.numpy as jnp

def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")

ARGS = (struct(8, 64), struct(64, 32), struct(32))

def layer(x, w, b):
    return jax.nn.relu(x @ w + b)

def leaky(x, w, b):
    h = x @ w + b
    return jax.nn.relu(h), h
"""


def block_of(language, with_text):
    """The one block of the page that has this text in it."""
    (found,) = [b for b in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) if with_text in b]
    return found


FLAX_MODEL = block_of("python", "class Mlp")
TEST_FILE = block_of("python", "def test_mlp_stays_fused")


@pytest.fixture
def pytest_run(pytester, monkeypatch, plugin_options):
    """Runs pytest on a test file's text, in a folder with the module `model`; by default in this process."""
    # For processes of their own, where FusionLab is not installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(model=MODEL)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider")
    pytester.syspathinsert()

    def run(text=None, *options, plugin=None, **files):
        if text is not None:
            head = "import pytest\nfrom model import *\n\n"
            pytester.makepyfile(test_model=head + textwrap.dedent(text))
        return pytester.runpytest_inprocess(*(plugin_options if plugin is None else plugin), *options)

    return run


def text_of(result):
    return result.stdout.str()


# -- the entry point ---------------------------------------------------------------------------------------------------------


def test_the_package_registers_the_plugin():
    with open(ROOT / "pyproject.toml", "rb") as f:
        project = tomllib.load(f)
    assert project["project"]["entry-points"]["pytest11"] == {"fusionlab": "fusionlab_pytest"}
    assert "fusionlab_pytest.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]


def test_the_options_stand_in_a_group_of_their_own(pytest_run):
    shown = text_of(pytest_run(None, "--help"))
    group = shown[shown.index("fusions locked in tests") :].split("\n\n")[0]
    assert re.findall(r"^  (--[\w-]+)", group, re.M) == [
        "--fusionlab-update",
        "--fusionlab-report",
        "--fusionlab-device",
    ]
    assert "fusionlab_device (string)" in shown
    assert "@pytest.mark.fusionlab(passes=..., device=..., implementation=...)" in text_of(
        pytest_run(None, "--markers")
    )


def test_without_the_plugin_the_fixture_is_missing_and_nothing_else(pytest_run):
    text = """
        def test_other():
            pass

        def test_sites(fusionlab):
            pass
    """
    result = pytest_run(text, "-p", "no:fusionlab", plugin=())
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*fixture 'fusionlab' not found"])
    assert "= fusionlab =" not in text_of(result)


def test_tests_that_do_not_use_it_get_no_section(pytest_run):
    result = pytest_run("def test_other(): pass")
    result.assert_outcomes(passed=1)
    assert "= fusionlab =" not in text_of(result)


# -- the assertions as methods -------------------------------------------------------------------------------------------------


def test_each_assertion_passes_and_the_summary_tells_what_was_seen(pytest_run):
    result = pytest_run("""
        def test_sites(fusionlab):
            found = fusionlab.assert_fused(layer, ARGS, expect={"gemm_epilogue": 1}, survive={"relu": 0})
            assert found.candidates
            (rejection,) = fusionlab.assert_rejected(leaky, ARGS, code="escapes", pass_="gemm_epilogue")
            arrays = [jnp.ones(a.shape) for a in ARGS]
            assert fusionlab.assert_equivalent(layer, arrays, grad=True).numerics.ok

        def test_other():
            pass
    """)
    result.assert_outcomes(passed=2)
    told = "test_model.py::test_sites: 3 assertions; 2 fused (gemm_epilogue 2); 1 declined (escapes 1)"
    result.stdout.fnmatch_lines(["*= fusionlab =*", told])
    assert "test_other" not in text_of(result)[text_of(result).index("= fusionlab =") :]


def test_each_assertion_fails_at_the_users_line_and_no_other(pytest_run):
    result = pytest_run("""
        def test_fused(fusionlab):
            fusionlab.assert_fused(leaky, ARGS, survive={"relu": 0})

        def test_rejected(fusionlab):
            fusionlab.assert_rejected(layer, ARGS, code="rank")

        def test_equivalent(fusionlab):
            fusionlab.assert_equivalent(layer, [jnp.ones(a.shape) for a in ARGS], fused=lambda *a: 2 * layer(*a))

        def test_snapshot(fusionlab):
            fusionlab.snapshot(layer, ARGS)
    """)
    result.assert_outcomes(failed=4)
    shown = text_of(result)
    for line in (6, 9, 12, 15):
        assert f"test_model.py:{line}: FusionAssertionError" in shown
    assert not re.findall(r"^\S*fusionlab/testing/\S*:\d+", shown, re.M)  # no frame of ours
    result.stdout.fnmatch_lines(
        [
            "E *leaky: relu: 1 not fused, expected 0",
            "E * relu at model.py:14: return jax.nn.relu(h), h",
            "E *nearest miss:",
            "E *[[]escapes[]] gemm_epilogue@#2 at model.py:13: relu is not fused:*is also returned",
            "E * model.py:13: h = x @ w + b",
            "E * edit: *",
            "E *report: *test_model.test_fused.html",
            "E *layer: expected a site declined [[]rank[]], got none",
            "E *layer: 4 of 4 outputs and gradients are worse than the original's",
            "E *report: *test_model.test_equivalent.html",
            "E *no snapshot __fusionlab__/test_model/test_snapshot.txt yet: run pytest --fusionlab-update*",
        ]
    )


def test_not_slower_is_skipped_with_its_reason_away_from_a_gpu(pytest_run):
    result = pytest_run(
        """
        def test_time(fusionlab):
            fusionlab.assert_not_slower(layer, [jnp.ones(a.shape) for a in ARGS])
        """,
        "-rs",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*assert_not_slower needs a CUDA GPU for device time; this process runs on*"])


def test_a_mistake_in_the_test_is_told_as_one(pytest_run):
    result = pytest_run("""
        def test_name(fusionlab):
            fusionlab.assert_fused(layer, ARGS, expect={"gemm_epilog": 1})
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *UnknownNameError: unknown pass or concept in expect 'gemm_epilog'*Did you mean 'gemm_epilogue'*"]
    )


# -- reports -----------------------------------------------------------------------------------------------------------------


FAILS = """
    @pytest.mark.parametrize("n", [1, 2])
    def test_count(fusionlab, n):
        fusionlab.assert_fused(leaky, ARGS, survive={"relu": n - 1})
"""


@pytest.mark.parametrize("how", ["option", "ini"])
def test_a_failure_writes_a_report_of_the_program_before_and_after(pytest_run, pytester, how):
    if how == "ini":
        pytester.makeini("[pytest]\nfusionlab_report = reports/deep")
    result = pytest_run(FAILS, *(("--fusionlab-report", "reports/deep") if how == "option" else ()))
    result.assert_outcomes(passed=1, failed=1)
    (page,) = (pytester.path / "reports" / "deep").iterdir()
    assert re.fullmatch(r"test_model\.test_count-1-\w{8}\.html", page.name)
    assert f"report: {page}" in text_of(result)
    html = page.read_text()
    assert re.search(r"After fusion: \d nodes → \d", html)
    assert "gemm_epilogue@#2" in html


def test_without_the_option_a_report_goes_to_pytests_temporary_folder(pytest_run, pytester):
    result = pytest_run(FAILS)
    (page,) = set(re.findall(r"report: (\S+\.html)$", text_of(result), re.M))
    assert Path(page).is_file()
    assert not Path(page).is_relative_to(pytester.path / "reports")
    assert sorted(p.name for p in pytester.path.iterdir() if p.suffix == ".html") == []


def test_a_report_that_cannot_be_written_hides_no_failure(pytest_run, pytester):
    (pytester.path / "taken").write_text("a file")
    result = pytest_run(FAILS, "--fusionlab-report", "taken")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *relu: 1 not fused, expected 0", "E *no report: cannot write*"])


# -- devices and the marker ----------------------------------------------------------------------------------------------------

MIX = """
    def mix(x):
        return x + jnp.cos(x) * (jnp.sin(x) - x)

    def sites(fusionlab, **options):
        return len(fusionlab.assert_fused(mix, ARGS[:1], survive=dict(tanh=0), **options).select())

    {marker}
    def test_mix(fusionlab):
        assert sites(fusionlab) == {n}
"""


@pytest.mark.parametrize(
    ("marker", "options", "n"),
    [
        ("", (), 1),
        ("", ("--fusionlab-device", "sm_90"), 0),
        ("", ("-o", "fusionlab_device=sm_90"), 0),
        ("@pytest.mark.fusionlab(device='sm_90')", (), 0),
        ("@pytest.mark.fusionlab(device='cpu')", ("--fusionlab-device", "sm_90"), 1),
        ("@pytest.mark.fusionlab(passes='gemm_epilogue')", (), 0),
        ("@pytest.mark.fusionlab(device='sm_90', passes='lerp')", (), 1),  # a pass that is named is taken
    ],
)
def test_marker_option_and_ini_set_what_is_judged_for(pytest_run, marker, options, n):
    pytest_run(MIX.format(marker=marker, n=n), *options).assert_outcomes(passed=1)


def test_the_nearest_marker_goes_first_argument_by_argument_and_a_call_before_all(pytest_run):
    result = pytest_run(
        MIX.format(marker="", n=1)
        + """
    @pytest.mark.fusionlab(device="sm_90", passes="gemm_epilogue")
    class TestMix:
        @pytest.mark.fusionlab(passes="lerp")
        def test_named(self, fusionlab):
            found = fusionlab.assert_fused(mix, ARGS[:1], expect={"lerp": 1})
            assert "sm_90" in found.device

        def test_call(self, fusionlab):
            assert sites(fusionlab, passes=None, device="cpu") == 1
    """
    )
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(("marker", "odd"), [("devices='cpu'", "devices"), ("'cpu'", "'cpu'")])
def test_a_marker_with_another_argument_is_refused(pytest_run, marker, odd):
    result = pytest_run(MIX.format(marker=f"@pytest.mark.fusionlab({marker})", n=1))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*pytest.mark.fusionlab: got {odd}, needed passes, device, implementation, by name"])


def test_a_device_that_does_not_exist_is_told(pytest_run):
    result = pytest_run(MIX.format(marker="", n=1), "--fusionlab-device", "h800")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *device: got 'h800', needed*sm_NN*'a100', 'l4', 'h100'*"])


def test_a_card_is_named_as_people_name_it(pytest_run):
    result = pytest_run(MIX.format(marker="", n=0), "--fusionlab-device", "H200")
    result.assert_outcomes(passed=1)


# -- snapshots -----------------------------------------------------------------------------------------------------------------

SNAPSHOT = """
    def test_layer(fusionlab):
        fusionlab.snapshot({fn}, ARGS)
"""


def stored(pytester):
    return {p.relative_to(pytester.path).as_posix(): p.read_text() for p in pytester.path.glob("__fusionlab__/**/*.*")}


def test_a_snapshot_is_missing_written_equal_changed_and_rewritten(pytest_run, pytester):
    path = "__fusionlab__/test_model/test_layer.txt"
    missing = pytest_run(SNAPSHOT.format(fn="layer"))
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines([f"E *no snapshot {path} yet: run pytest --fusionlab-update*"])
    assert stored(pytester) == {}

    written = pytest_run(None, "--fusionlab-update")
    written.assert_outcomes(passed=1)
    written.stdout.fnmatch_lines(["test_model.py::test_layer: 1 assertion; 1 fused*; snapshots written 1"])
    first = stored(pytester)
    assert list(first) == [path]

    equal = pytest_run(None)
    equal.assert_outcomes(passed=1)
    equal.stdout.fnmatch_lines(["*snapshots equal 1"])

    changed = pytest_run(SNAPSHOT.format(fn="leaky"))
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            f"E *snapshot {path} differs; if the change is intended, run pytest --fusionlab-update and commit the file",
            "E *--- stored",
            "E *+++ now",
            "E *-  gemm_epilogue@#1: relu(x @ w + b)",
            "E *+  gemm_epilogue@#1: x @ w + b",
            "E *+  gemm_epilogue@#2 [[]escapes[]]",
            "E *report: *.html",
        ]
    )
    assert stored(pytester) == first

    again = pytest_run(None, "--fusionlab-update")
    again.assert_outcomes(passed=1)
    again.stdout.fnmatch_lines(["*snapshots rewritten 1"])
    assert list(stored(pytester)) == [path]
    assert stored(pytester) != first
    pytest_run(None).assert_outcomes(passed=1)


def test_a_snapshot_stays_where_lines_only_move_or_the_folder_does(pytest_run, pytester):
    pytest_run(SNAPSHOT.format(fn="leaky"), "--fusionlab-update").assert_outcomes(passed=1)
    (text,) = stored(pytester).values()
    assert not re.search(r"0x[0-9a-f]{4}|\.py|/tmp|" + re.escape(str(pytester.path)), text)
    model = "# a line more\n\n" + MODEL.replace("    h = x @ w + b", "    # and one more\n    h = x @ w + b")
    pytester.makepyfile(model=model)
    pytest_run(None).assert_outcomes(passed=1)


def test_a_snapshot_is_judged_for_a_cpu_unless_a_device_is_named(pytest_run, pytester):
    text = MIX.replace("assert sites(fusionlab) == {n}", "{body}")
    body = "found = fusionlab.snapshot(mix, ARGS[:1], graph=False)"
    on_cpu = f"{body}\n        assert found.device == 'a CPU (simulated)'"
    pytest_run(text.format(marker="", body=on_cpu), "--fusionlab-update").assert_outcomes(passed=1)
    (text_cpu,) = stored(pytester).values()
    assert "lerp: 1" in text_cpu
    assert "graph:" not in text_cpu
    result = pytest_run(text.format(marker="", body=body), "--fusionlab-device", "sm_90")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *left as they are:", "E *+  lerp@#1"])


def test_classes_parameters_and_names_make_files_of_their_own(pytest_run, pytester):
    result = pytest_run(
        """
        class TestLayers:
            @pytest.mark.parametrize("act", ["relu", "a/b", "a:b", "../up"])
            def test_layer(self, fusionlab, act):
                fusionlab.snapshot(layer, ARGS)
                fusionlab.snapshot(leaky, ARGS, name="leaky")

        def test_twice(fusionlab):
            fusionlab.snapshot(layer, ARGS, name="one")
            with pytest.raises(ValueError, match="'one' twice"):
                fusionlab.snapshot(leaky, ARGS, name="one")
        """,
        "--fusionlab-update",
    )
    result.assert_outcomes(passed=5)
    assert len(stored(pytester)) == 9
    assert {Path(p).parent.as_posix() for p in stored(pytester)} == {"__fusionlab__/test_model"}
    assert "__fusionlab__/test_model/test_twice.one.txt" in stored(pytester)
    pytest_run(None).assert_outcomes(passed=5)


def test_a_snapshot_that_cannot_be_read_says_what_to_do(pytest_run, pytester):
    path = pytester.path / "__fusionlab__" / "test_model" / "test_layer.txt"
    path.mkdir(parents=True)
    result = pytest_run(SNAPSHOT.format(fn="layer"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *OutputError: cannot read the snapshot*delete it, and run --fusionlab-update"])


def test_snapshots_are_not_collected_as_doctests(pytest_run, pytester):
    folder = pytester.mkdir("__fusionlab__")
    for path in (pytester.path, folder):
        (path / "test_text.txt").write_text(">>> 1 + 1\n3\n")
    pytest_run("def test_other(): pass").assert_outcomes(passed=1, failed=1)
    (pytester.path / "test_text.txt").unlink()
    pytest_run(None).assert_outcomes(passed=1)


NAMES = [
    "a",
    "a.b",
    "a_b",
    "a[b]",
    "a[b",
    "a/b",
    "a:b",
    "a b",
    "..",
    "../a",
    "a-b",
    "é",
    "x" * 300,
    "x" * 301,
    "[]",
    "",
]


def test_file_names_are_safe_and_differ_where_the_names_do():
    names = [file_name(n) for n in NAMES]
    assert len(set(names)) == len(NAMES)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,140}", n) and not n.startswith(".") for n in names)
    assert file_name("test_mlp") == "test_mlp"
    assert snapshot_path(Path("/x/test_m.py"), "test_mlp", "one") == Path("/x/__fusionlab__/test_m/test_mlp.one.txt")


# -- pytest-xdist ----------------------------------------------------------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize("others", [False, True], ids=["no other plugins", "all that are installed"])
def test_with_workers_summary_reports_and_snapshots_are_as_without(
    pytest_run, pytester, plugin_options, monkeypatch, others
):
    text = """
        @pytest.mark.parametrize("n", range(4))
        def test_layer(fusionlab, n):
            fusionlab.snapshot(layer, ARGS)
            fusionlab.assert_fused(leaky, ARGS, expect={"gemm_epilogue": 1}, survive={"relu": 1 if n else 0})
    """
    if not others:  # which each of the three processes would import
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        plugin_options = ("-p", "fusionlab_pytest")
    options = ("--fusionlab-update", "--fusionlab-report", "reports", "-p", "xdist", "-n", "2")
    pytester.makepyfile(test_model="import pytest\nfrom model import *\n" + textwrap.dedent(text))
    result = pytester.runpytest_subprocess(*plugin_options, *options, timeout=240)
    result.assert_outcomes(passed=3, failed=1)
    assert len(stored(pytester)) == 4
    (page,) = (pytester.path / "reports").iterdir()
    told = re.findall(
        r"^test_model\.py::test_layer\[(\d)\]: 2 assertions; 2 fused .*; snapshots written 1", text_of(result), re.M
    )
    assert sorted(told) == ["0", "1", "2", "3"]
    assert f"report: {page}" in text_of(result)
    assert text_of(result).count("= fusionlab =") == 1


def test_a_long_summary_is_cut_unless_asked_for(pytest_run):
    text = """
        @pytest.mark.parametrize("n", range(23))
        def test_many(fusionlab, n):
            fusionlab.assert_fused(jnp.sin, ARGS[:1], survive={"sin": 1}, passes="lerp")
    """
    brief = text_of(pytest_run(text))
    assert "and 3 more tests: -v tells all" in brief
    assert len(re.findall(r"^test_model.py::test_many\[\d+\]: 1 assertion; 0 fused; 0 declined$", brief, re.M)) == 20
    long = text_of(pytest_run(None, "-v"))
    assert len(re.findall(r"^test_model.py::test_many\[\d+\]: 1 assertion", long, re.M)) == 23


# -- docs/testing.md: a library's test file of ten lines --------------------------------------------------------------------------


@pytest.fixture
def library(pytest_run, pytester):
    """A library of a flax model, with the page's test file and its snapshot."""
    pytester.makepyfile(my_library=FLAX_MODEL, test_fusions=TEST_FILE)
    pytest_run(None, "--fusionlab-update").assert_outcomes(passed=1)
    return pytest_run


def test_the_pages_test_file_has_ten_lines_and_passes(library):
    lines = [line for line in TEST_FILE.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10
    library(None).assert_outcomes(passed=1)


def test_the_page_names_every_option_and_assertion():
    asserts = [name for name in fusionlab.testing.__all__ if name.startswith("assert_")]
    assert len(asserts) == 4
    for name in ("--fusionlab-update", "--fusionlab-report", "--fusionlab-device", *asserts):
        assert name in PAGE, name
    assert "pytest.mark.fusionlab(" in PAGE


def edit(pytester, old, new):
    """Changes the flax model; returns the number of the first line that is new."""
    assert FLAX_MODEL.count(old) == 1
    pytester.makepyfile(my_library=FLAX_MODEL.replace(old, new))
    text = (pytester.path / "my_library.py").read_text()
    return text[: text.index(new)].count("\n") + 1


def test_returning_the_pre_activation_fails_and_names_its_line(library, pytester):
    edit(pytester, "return nn.Dense(8)(y)", "return nn.Dense(8)(y), h")
    result = library(None)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *[[]escapes[]] gemm_epilogue@Mlp/Dense_0#2 at my_library.py:8: relu is not fused*is also returned",
            "E * my_library.py:8: h = nn.Dense(32)(x)",
            "E * edit: let the activation be the only reader*",
        ]
    )
    shown = re.findall(r"^E +(.*)$", text_of(result), re.M)
    message = block_of("text", "nearest miss")
    shown = [line.strip().removeprefix("fusionlab.testing.messages.FusionAssertionError: ") for line in shown]
    for line in message.strip().splitlines():
        assert line.strip() in shown


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("y = nn.relu(h)", "y = nn.relu6(h)", "[activation]"),
        ("y = nn.relu(h)", "y = nn.relu(h.astype('bfloat16')).astype('float32')", "[dtype]"),
        ("y = nn.relu(h)", "import jax; y = nn.relu(jax.lax.stop_gradient(h))", "[stop_gradient]"),
    ],
)
def test_breaking_the_model_names_the_line_that_broke_it(library, pytester, old, new, said):
    line = edit(pytester, old, new)
    result = library(None)
    result.assert_outcomes(failed=1)
    message = "\n".join(re.findall(r"^E +(.*)$", text_of(result), re.M))
    assert said in message
    assert f"my_library.py:{line}: {new}" in message
