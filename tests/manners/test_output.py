"""Results appear complete or not at all."""

import pytest

from fusionlab.errors import ArgumentError, OutputError
from fusionlab.output import check_file, output_folder


def test_a_new_folder_appears_whole_and_only_at_the_end(tmp_path):
    target = tmp_path / "a" / "b"
    with output_folder(target) as work:
        (work / "inner").mkdir()
        (work / "inner" / "x.txt").write_text("x")
        assert not target.exists()
    assert (target / "inner" / "x.txt").read_text() == "x"
    assert [p.name for p in target.parent.iterdir()] == ["b"]
    assert target.stat().st_mode & 0o500 == 0o500


def test_an_existing_folder_keeps_its_other_files(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "x.txt").write_text("old")
    with output_folder(tmp_path) as work:
        (work / "x.txt").write_text("new")
        (work / "sub").mkdir()
        (work / "sub" / "y.txt").write_text("y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.txt", "sub", "x.txt"]
    assert (tmp_path / "x.txt").read_text() == "new"
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("existed", [False, True])
def test_an_error_leaves_nothing_behind(tmp_path, existed):
    target = tmp_path / "a" / "b"
    if existed:
        target.mkdir(parents=True)

    def fail_half_way():
        with output_folder(target) as work:
            (work / "x.txt").write_text("x")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert [p.name for p in tmp_path.rglob("*")] == (["a", "b"] if existed else [])


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_is_refused_before_the_work(tmp_path, place):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OutputError, match="cannot write to the folder"), output_folder(tmp_path / place):
        pytest.fail("the work was started")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_without_write_permission_is_refused():
    # /proc refuses new entries even to root, as a read-only folder does to others.
    with pytest.raises(OutputError, match="/proc"), output_folder("/proc/fusionlab/demo"):
        pytest.fail("the work was started")


def test_a_file_that_cannot_be_is_refused_before_the_work_and_leaves_nothing(tmp_path):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("a file")
    for place in ("nowhere/x.html", "file/x.html", "folder.html"):
        with pytest.raises(OutputError, match="cannot write the file"):
            check_file(tmp_path / place, ".html")
    with pytest.raises(ArgumentError, match=r"needed a name that ends in \.html"):
        check_file(tmp_path / "x.pdf", ".html")
    assert check_file(tmp_path / "x.HTML", ".html") == tmp_path / "x.HTML"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.html"]
