#!/usr/bin/env bash
# A stateful LSTM of Keras forgets its state between batches on the JAX backend.
#
# Guess: with `stateful=True` a batch begins with the state that the batch before it left, as the page of the layer
#   says, so that `fit` and `predict` on consecutive windows are truncated backpropagation through time.
# Behavior: it does when the model is called. In `predict` and `fit` each batch begins from zeros, without a warning.
# Seen with keras 3.15.1 and jax 0.10.1, Python 3.11; one window, twice:
#   call 0.805 0.865
#   predict 0.805 0.805
#   fit 0.649 0.649
# What helps: a loop of one's own that calls the model, or the state as an input and an output of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check keras==3.15.1 jax==0.10.1 jaxlib==0.10.1
cat >"$folder/stateful.py" <<'END_OF_FILE'
import keras
import numpy as np

x, y = np.ones((2, 3, 1), "float32"), np.zeros((2, 1), "float32")
ones = {"kernel_initializer": "ones", "recurrent_initializer": "ones"}
layer = keras.layers.LSTM(1, stateful=True, **ones)
model = keras.Sequential([keras.Input(batch_shape=x.shape), layer])
model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")


def fit():
    return model.fit(x, y, batch_size=2, shuffle=False, verbose=0).history["loss"][0]


runs = {
    "call": lambda: model(x)[0, 0],
    "predict": lambda: model.predict(x, batch_size=2, verbose=0)[0, 0],
    "fit": fit,
}
for name, run in runs.items():
    layer.reset_states()
    print(name, *(f"{float(run()):.3f}" for _ in range(2)))
END_OF_FILE
export KERAS_BACKEND=jax KERAS_HOME="$folder/home" JAX_PLATFORMS=cpu
"$folder/env/bin/python" "$folder/stateful.py" | tee "$folder/found"
diff "$folder/found" - <<'END_OF_FILE'
call 0.805 0.865
predict 0.805 0.805
fit 0.649 0.649
END_OF_FILE
echo "as described"
