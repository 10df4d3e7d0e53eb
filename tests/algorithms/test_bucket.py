"""Paths of a bucket."""

import os

from etils import epath

from jaxpar.base.bucket import as_path


def test_paths_in_a_bucket():
    path = epath.Path("gs://bucket/a/run")
    assert os.fspath(path / "x") == str(path / "x") == "gs://bucket/a/run/x"
    assert str((path / "x").relative_to(path)) == "x"
    assert (path / "x").parent == path
    assert str(path.with_name("b")) == "gs://bucket/a/b"
    assert as_path(path) is path
