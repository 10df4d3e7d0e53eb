#!/usr/bin/env bash
# Grain draws rows again before all of them were drawn, where `shuffle` follows `repeat`.
#
# Guess: `repeat` and `shuffle` may be written in either order: an epoch has each row once.
# Behavior: after `repeat` all epochs are shuffled as one, so that the first epoch has some rows twice and misses
#   others. `shuffle` before `repeat` has each row once in each epoch, in another order.
# Seen with grain 0.2.18, Python 3.11; 1,000 rows, distinct ones among the first 1,000:
#   repeat, shuffle: 746
#   shuffle, repeat: 1000, orders differ: True
# What helps: shuffle first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check grain==0.2.18
cat >"$folder/order.py" <<'END_OF_FILE'
import grain

NUM_ROWS = 1000
rows = grain.MapDataset.range(NUM_ROWS)
after, before = list(rows.repeat(2).shuffle(seed=0)), list(rows.shuffle(seed=0).repeat(2))
print("repeat, shuffle:", len(set(after[:NUM_ROWS])))
differ = before[:NUM_ROWS] != before[NUM_ROWS:]
print(f"shuffle, repeat: {len(set(before[:NUM_ROWS]))}, orders differ: {differ}")
END_OF_FILE
"$folder/env/bin/python" "$folder/order.py" 2>"$folder/log" | tee "$folder/found"
diff "$folder/found" - <<'END_OF_FILE'
repeat, shuffle: 746
shuffle, repeat: 1000, orders differ: True
END_OF_FILE
echo "as described"
