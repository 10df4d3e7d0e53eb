#!/usr/bin/env bash
# An option that a conftest.py adds works until the file that it names exists.
#
# Guess: in `pytest --record FILE`, FILE is the value of the option, whether that file exists or not.
# Behavior: before conftest.py is loaded, pytest does not know that the option takes a value. If FILE exists,
#   it is taken for a path of tests: the root folder and the conftest.py are looked for from there, and the
#   option is then unknown. So a command that writes FILE works once and fails from the second time on.
# Seen with pytest 9.2.0, Python 3.11; FILE is in another folder than the tests:
#   first, after a space: exit 0
#   again, after a space: exit 4, unrecognized arguments
#   again, after "=": exit 0
# What helps: write `--record=FILE`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check pytest==9.2.0
mkdir "$folder/project" "$folder/out"
cat >"$folder/project/pyproject.toml" <<'END_OF_FILE'
[tool.pytest.ini_options]
testpaths = ["tests"]
END_OF_FILE
mkdir "$folder/project/tests"
cat >"$folder/project/tests/conftest.py" <<'END_OF_FILE'
def pytest_addoption(parser):
    parser.addoption("--record")


def pytest_sessionfinish(session):
    with open(session.config.getoption("--record"), "a") as out:
        out.write("ran\n")
END_OF_FILE
echo "def test_nothing(): pass" >"$folder/project/tests/test_nothing.py"
cd "$folder/project"
attempt() {
  local code=0 name=$1
  shift
  "$folder/env/bin/python" -m pytest -q "$@" >"$folder/printed" 2>&1 || code=$?
  grep -q "unrecognized arguments" "$folder/printed" && code="$code, unrecognized arguments"
  echo "$name: exit $code"
}
{
  attempt "first, after a space" --record "$folder/out/record"
  attempt "again, after a space" --record "$folder/out/record"
  attempt 'again, after "="' --record="$folder/out/record"
} | tee "$folder/found"
diff "$folder/found" - <<'END_OF_FILE'
first, after a space: exit 0
again, after a space: exit 4, unrecognized arguments
again, after "=": exit 0
END_OF_FILE
echo "as described"
