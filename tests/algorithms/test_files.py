"""Files are read as anybody may have made them: nothing waits for a pipe, nothing ends in a traceback."""

import os
import socket

import pytest

from jaxpar.base.files import check_file, read_file, read_json


def test_a_file_is_read_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"\x00text")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == read_file(str(tmp_path / "file")) == b"\x00text"


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "link", tmp_path / "socket", "/dev/zero"):
            told = "it is a pipe, a socket or a device, not a file"
            message = rf"^cannot read the text {path}: {told}\nFix: ask$"
            with pytest.raises(OSError, match=message):
                read_file(path, "the text", "ask")


def test_what_cannot_be_read_is_said_in_words(tmp_path):
    with pytest.raises(
        IsADirectoryError, match=r"^cannot read /.*: Is a directory\nFix: give a read"
    ):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^cannot read /.*none: No such file or directory"):
        read_file(tmp_path / "none")
    with pytest.raises(FileNotFoundError) as raised:
        check_file(tmp_path / "none")
    assert raised.value.filename == str(tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b'{"a": \xff}', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 10_000 + "}", "not JSON"),
        ("[{}]", "no JSON object"),
        ("null", "no JSON object"),
    ],
)
def test_what_is_no_object_of_json_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        read_json(content)


def test_an_object_of_json_is_read():
    assert read_json(b'{"a": [1, null]}') == read_json('{"a": [1, null]}') == {"a": [1, None]}
